"""Bring one model back on fresh ranks: its newest snapshot, then every kept command since, in order.

On CPU the result is bit-identical to the undisturbed run; the metrics of replayed commands are compared with those that
were published, and a difference is counted and logged as an alarm.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from tinsmith.actors.metrics import Catalogue
from tinsmith.actors.service.options import ServiceOptions
from tinsmith.actors.training.outcome import reduce_replies
from tinsmith.actors.workers.group import Group
from tinsmith.actors.workers.step import Step, plan_step
from tinsmith.bus.bus import Bus
from tinsmith.bus.protocol.errors import TinsmithError

log = logging.getLogger("tinsmith.recovery")


@dataclass(frozen=True)
class Restored:
    """Where the model stands now."""

    applied: int
    snapshot: int | None
    replayed: int
    differs: int


async def restore_model(
    bus: Bus, group: Group, options: ServiceOptions, catalogue: Catalogue, model: str, epoch: int
) -> Restored:
    """Restore `model` on every rank of `group`. Raises RanksLost, or the typed error of a damaged snapshot."""
    snapshot = snapshot_of(await bus.meta(model))
    applied, replayed, differs = -1, 0, 0
    if snapshot is not None:
        path = str(options.snapshot_dir(model, snapshot))
        step = Step(model, epoch, bus.incarnation, "restore", path=path)
        replies = await group.replies(group.send(step), options.step_deadline)
        if replies[0].error is not None:
            raise TinsmithError.from_wire(replies[0].error)
        applied = snapshot
    async for taken in bus.redo_log(model):
        if taken.command.seq <= applied:
            continue
        step = plan_step(
            taken.command,
            epoch=epoch,
            incarnation=bus.incarnation,
            after=applied,
            ranks=options.ranks,
            token_budget=options.token_budget,
        )
        replies = await group.replies(group.send(step, taken.body), options.step_deadline)
        outcome = reduce_replies(taken.command.kind, replies, step.plan, catalogue)
        applied = taken.command.seq
        replayed += 1
        published = await bus.result(taken.command.id)
        if published is not None and not _same(published[0].metrics, outcome.metrics):
            differs += 1
            log.error("replay of %s seq %d gave other metrics than were published", model, applied)
    return Restored(applied, snapshot, replayed, differs)


def snapshot_of(meta: Mapping[str, str]) -> int | None:
    """The seq of the newest recorded snapshot, from a model's meta on the bus."""
    seq = int(meta.get("snapshot", -1))
    return seq if seq >= 0 else None


def _same(left: dict[str, float], right: dict[str, float]) -> bool:
    """Equal keys and values; NaN equals NaN."""
    return left.keys() == right.keys() and all(
        value == right[key] or (math.isnan(value) and math.isnan(right[key])) for key, value in left.items()
    )

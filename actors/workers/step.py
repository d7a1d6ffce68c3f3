"""Step and RankReply: what the coordinator sends to every rank of a group, and what each rank sends back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tinsmith.actors.schedule.planner import Plan, plan_batch
from tinsmith.bus.protocol.envelope import Command, Kind
from tinsmith.bus.protocol.errors import TinsmithError

Housekeeping = Literal["snapshot", "restore", "forget"]
"""Work of the service's own, outside a model's order: write a snapshot, go back to one, drop a model."""


@dataclass(frozen=True)
class Step:
    """One unit of SPMD work; every rank of a group gets the same ones in the same order."""

    model: str
    epoch: int
    incarnation: str
    work: Kind | Housekeeping
    seq: int = -1
    after: int = -1
    """The seq that must have been applied just before; a redo log has holes where read-only commands were."""
    command: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    refusal: dict[str, Any] | None = None
    """TinsmithError.to_wire of a refusal that was decided before the ranks; they record it as the outcome."""
    path: str = ""
    """Folder of the snapshot, for housekeeping."""


@dataclass(frozen=True)
class RankReply:
    """One rank's share of a step's outcome. `error` (TinsmithError.to_wire) is the same on every rank."""

    indices: npt.NDArray[np.int64] | None = None
    """[local datums]: which datums of the batch the rows below are."""
    columns: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    """Column name -> [local datums]."""
    logprobs: tuple[npt.NDArray[np.float32], ...] = ()
    """Per local datum [tokens] or [tokens, K]."""
    scalars: dict[str, float] = field(default_factory=dict)
    """Columns of the command as a whole; equal on every rank."""
    result: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    seconds: float = 0.0


def plan_step(command: Command, *, epoch: int, incarnation: str, after: int, ranks: int, token_budget: int) -> Step:
    """The step that carries out `command` after seq `after`; a batch that can't be planned becomes a refusal."""
    plan, refusal = None, None
    if command.kind in (Kind.FORWARD, Kind.FORWARD_BACKWARD):
        try:
            plan = plan_batch(command.lengths, ranks, token_budget)
        except TinsmithError as error:
            refusal = error.at(model=command.model, command=command.id).to_wire()
    return Step(
        model=command.model,
        epoch=epoch,
        incarnation=incarnation,
        work=command.kind,
        seq=command.seq,
        after=after,
        command=command.id,
        args=command.args,
        plan=plan,
        refusal=refusal,
    )

"""From the replies of all ranks to one outcome: rows in datum order, reduced by the catalogue, and the result's body.

Pure: the same rows give the same metrics, however the batch was dealt over ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tinsmith.actors.metrics import Catalogue, rows_in_order
from tinsmith.actors.schedule.planner import Plan
from tinsmith.actors.workers.step import RankReply
from tinsmith.bus.protocol.codec import encode, pack_ragged
from tinsmith.bus.protocol.envelope import Kind
from tinsmith.bus.protocol.errors import RanksLost, TinsmithError


@dataclass(frozen=True)
class Outcome:
    """What a command led to: metrics and results, or an error."""

    metrics: dict[str, float] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    result: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""
    error: TinsmithError | None = None


def reduce_replies(kind: Kind, replies: Sequence[RankReply], plan: Plan | None, catalogue: Catalogue) -> Outcome:
    """The outcome of one step on all ranks.

    Raises RanksLost when the ranks do not agree on whether the step was carried out: they are out of step.
    """
    errors = [reply.error for reply in replies]
    if any(error is not None for error in errors):
        if any(error is None or error["code"] != errors[0]["code"] for error in errors if errors[0] is not None) or (
            errors[0] is None
        ):
            raise RanksLost(f"the ranks disagree on a step: {errors}", remedy="The group is rebuilt.")
        assert errors[0] is not None
        return Outcome(error=TinsmithError.from_wire(errors[0]))
    scalars = {**replies[0].scalars, **(plan.scalars() if plan is not None else {})}
    try:
        rows, body = _rows_and_body(replies, plan)
        reduced = catalogue.reduce(kind, rows, scalars)
    except TinsmithError as error:
        return Outcome(error=error)
    return Outcome(metrics=reduced.metrics, flags=tuple(reduced.flags), result=replies[0].result, body=body)


def _rows_and_body(replies: Sequence[RankReply], plan: Plan | None) -> tuple[dict[str, npt.NDArray[np.float64]], bytes]:
    """Columns [datums] in datum order, and the encoded per-token log-probs."""
    parts = [reply for reply in replies if reply.indices is not None and len(reply.indices)]
    if plan is None or not parts:
        return {}, b""
    rows = rows_in_order(
        ((part.indices.tolist(), part.columns) for part in parts if part.indices is not None), plan.datums
    )
    order = np.argsort(np.concatenate([part.indices for part in parts if part.indices is not None]))
    logprobs = [array for part in parts for array in part.logprobs]
    return rows, encode({"logprobs": pack_ragged([logprobs[place] for place in order])})

"""Command and Event: the two small headers that travel on the bus. Bodies (token and log-prob arrays) ride beside them.

Version 1. A header is a msgpack map of the fields below; unknown fields are refused, so that a typo is not lost.
"""

from __future__ import annotations

import time
import uuid
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

VERSION = 1
SAMPLE_LANE = "@sample"
"""The queue of sampling commands: not a model, without order, shared by all replicas."""
CONTROL_LANE = "@control"
"""The queue of commands about commands, such as cancel: without order, never behind the work that they are about."""
LANES = frozenset({SAMPLE_LANE, CONTROL_LANE})
"""Queues that are no models."""

NAME_PATTERN = "[A-Za-z0-9@][A-Za-z0-9._:@-]{0,127}"
Name = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]
"""Name of a model, version or checkpoint: letters, digits and . _ : @ - (128 at most)."""


class Kind(StrEnum):
    """What a command asks for."""

    CREATE_MODEL = "create_model"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE = "save"
    LOAD = "load"
    PUBLISH = "publish"
    UNLOAD = "unload"
    INFO = "info"
    SAMPLE = "sample"
    CANCEL = "cancel"


MUTATING = frozenset({Kind.CREATE_MODEL, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP, Kind.LOAD, Kind.UNLOAD})
"""Kinds that change weights, gradients or optimizer: the redo log."""


def new_id() -> str:
    """A fresh command id: 32 hex digits, unique without coordination."""
    return uuid.uuid4().hex


class Header(BaseModel):
    """What Command and Event share: strict about unknown fields, immutable once made."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    v: Literal[1] = 1
    id: Name
    model: Name
    kind: Kind
    seq: int = Field(ge=-1)
    """Place in the model's order, from 0; -1 lets the bus assign the next one."""


class Command(Header):
    """One unit of work. `args` is checked against the kind's own schema (bus/protocol/commands.py)."""

    args: dict[str, Any] = {}
    lengths: tuple[int, ...] = ()
    """Tokens of each datum, so that a plan needs no look into the body."""
    submitted: float = Field(default_factory=time.time)
    """Unix seconds at the client."""


class Event(Header):
    """What became of one command: its metrics and small result, or its error."""

    n: int = 0
    """Number of this event in its model's stream, from 1; a hole in the numbers is a gap."""
    ok: bool
    metrics: dict[str, float] = {}
    result: dict[str, Any] = {}
    error: dict[str, Any] | None = None
    """As TinsmithError.to_wire gives it."""
    flags: tuple[str, ...] = ()
    """Keys of metrics that are not finite."""
    timing: dict[str, float] = {}
    """Seconds: queued (submit to taken), run (on the ranks), total."""
    body_bytes: int = 0
    """Size of the result's body, fetched apart (per-token log-probs, sampled tokens)."""

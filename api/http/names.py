"""Ids and paths of the HTTP API. Each is a function of what the client sent, so a repeated request names it again.

    session            s-<16 hex>
    model              <session>:train:<model_seq_id>
    sampling session   <session>:sample:<n>, or <model>:sampler:<seq> for one made by save_weights_for_sampler
    request            <model>:<seq> or <sampling session>:<seq>; it is also the command's id on the bus
    refused request    x-<32 hex>: never became a command, the reason is in the store

A path is tinker://<model>/<weights or sampler_weights>/<name>, the same thing as the place <model>/<name> on the bus.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tinsmith.bus.envelope import NAME_PATTERN, new_id
from tinsmith.bus.errors import InvalidInput

REFUSED_PREFIX = "x-"
UNNAMED_PREFIX = "@"
"""Begins the names of versions and checkpoints that the client did not name; a client's own may not."""

_NAME = re.compile(f"^{NAME_PATTERN}$")
_PATH = re.compile(r"^tinker://([^/]+)/([^/]+)/([^/]+)$")
_SESSION_MODEL = re.compile(r"^s-[0-9a-f]{16}:train:\d+$")
_UNNAMED_SAMPLER = re.compile(r"^(.+:train:\d+):sampler:(\d+)$")

PathKind = Literal["weights", "sampler_weights"]


def new_session_id() -> str:
    """A fresh session id that can't be guessed."""
    return f"s-{new_id()[:16]}"


def refused_id() -> str:
    """A fresh id for a request that is refused."""
    return REFUSED_PREFIX + new_id()


def model_id(session: str, number: int) -> str:
    """The model of this number in a session; clients derive the same id themselves."""
    return f"{session}:train:{number}"


def sampling_session_id(session: str, number: int) -> str:
    """The sampling session of this number in a session."""
    return f"{session}:sample:{number}"


def unnamed_sampler_id(model: str, seq: int) -> str:
    """The sampling session over the version that the model's command `seq` published without a name."""
    return f"{model}:sampler:{seq}"


def unnamed_version(sampler: str) -> str | None:
    """The version `model/@seq` behind such a sampling session; None for one of another kind."""
    found = _UNNAMED_SAMPLER.match(sampler)
    return f"{found[1]}/{UNNAMED_PREFIX}{found[2]}" if found else None


def request_id(owner: str, seq: int) -> str:
    """The request `seq` of a model or sampling session."""
    return f"{owner}:{seq}"


def session_of(name: str) -> str:
    """The session that a model, sampling session or request belongs to."""
    return name.partition(":")[0]


def is_session_model(model: str) -> bool:
    """Whether a model was made in a session, and goes with it."""
    return bool(_SESSION_MODEL.match(model))


def is_name(text: str) -> bool:
    """Whether the bus can carry this name."""
    return bool(_NAME.match(text))


def given_name(name: object, seq: int) -> str:
    """The client's name for a checkpoint or version, or one made of `seq` when it gave none. Raises InvalidInput."""
    if name is None:
        return f"{UNNAMED_PREFIX}{seq}"
    if not isinstance(name, str) or not is_name(name) or name.startswith(UNNAMED_PREFIX):
        raise InvalidInput(
            f"{name!r} can't name a checkpoint",
            remedy="Use letters, digits and . _ : @ - (128 at most), a letter or digit first.",
            field="path",
        )
    return name


@dataclass(frozen=True)
class TinkerPath:
    """`tinker://model/kind/name`."""

    model: str
    kind: PathKind
    name: str

    @property
    def place(self) -> str:
        """The checkpoint or version on the bus."""
        return f"{self.model}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        """`kind/name`, which names it within its model."""
        return f"{self.kind}/{self.name}"

    def __str__(self) -> str:
        return f"tinker://{self.model}/{self.kind}/{self.name}"


def parse_path(text: object, *kinds: PathKind) -> TinkerPath:
    """The parts of a path of one of these kinds (none given: of any). Raises InvalidInput."""
    found = _PATH.match(text) if isinstance(text, str) else None
    for kind in kinds or ("weights", "sampler_weights"):
        if found and found[2] == kind and is_name(found[1]) and is_name(found[3]):
            return TinkerPath(found[1], kind, found[3])
    raise InvalidInput(
        f"{text!r} is not such a path",
        remedy=f"Use tinker://MODEL/{' or '.join(kinds or ('weights', 'sampler_weights'))}/NAME as a save returned it.",
        field="path",
    )

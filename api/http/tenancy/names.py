"""Ids and paths of the HTTP API. Each is a function of what the client sent, so a repeated request names it again.

    session            s-<16 hex>
    model              <session>:train:<model_seq_id>
    sampling session   <session>:sample:<n>, or <model>:sampler:<seq> for one made by save_weights_for_sampler
    request            <model>:<seq> or <sampling session>:<seq>; it is also the command's id on the bus
    owned command      u-<owner>:<32 hex>: of no session and no model, such as a sample at another dialect
    refused request    x-<32 hex>: never became a command, the reason is in the store

A path is tinker://<model>/<kind>/<name>, the same thing as the place <model>/<name> on the bus. External weights, a
version that is downloaded and not sampled from, lie among the versions as `external.<name>`.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal

from tinsmith.bus.protocol.envelope import NAME_PATTERN, new_id
from tinsmith.bus.protocol.errors import InvalidInput

REFUSED_PREFIX = "x-"
UNNAMED_PREFIX = "@"
"""Begins the names of versions and checkpoints that the client did not name; a client's own may not."""
_OWNED_PREFIX = "u-"
EXTERNAL_PREFIX = "external."
"""Begins the names under which external weights lie; a client's own may not."""

_NAME = re.compile(f"^{NAME_PATTERN}$")
_PATH = re.compile(r"^tinker://([^/]+)/([^/]+)/([^/]+)$")
_SESSION_MODEL = re.compile(r"^s-[0-9a-f]{16}:train:\d+$")
_UNNAMED_SAMPLER = re.compile(r"^(.+:train:\d+):sampler:(\d+)$")

PathKind = Literal["weights", "sampler_weights", "external_weights"]
KINDS: tuple[PathKind, ...] = ("weights", "sampler_weights", "external_weights")
STORED_KINDS: tuple[PathKind, ...] = ("weights", "sampler_weights")
"""Those that lie on the disk under their own name; see `TinkerPath.stored`."""


def root_of(kind: PathKind) -> str:
    """The folder in the state directory below which `model/name` of a kind lies."""
    return "checkpoints" if kind == "weights" else "published"


def new_session_id() -> str:
    """A fresh session id that can't be guessed."""
    return f"s-{new_id()[:16]}"


def copy_session_id(owner: str, key: str) -> str:
    """The session that holds the copy which this owner asked for under this idempotency key."""
    return f"s-{hashlib.blake2b(f'{owner}:{key}'.encode(), digest_size=8).hexdigest()}"


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
    found = _UNNAMED_SAMPLER.fullmatch(sampler)
    return f"{found[1]}/{UNNAMED_PREFIX}{found[2]}" if found else None


def owned_id(owner: str) -> str:
    """A fresh id for a command of no session, in which its owner stands."""
    return f"{_OWNED_PREFIX}{owner}:{new_id()}"


def owner_in(name: str) -> str | None:
    """The owner that stands in an id; None for one of another kind."""
    first = session_of(name)
    return first.removeprefix(_OWNED_PREFIX) if first.startswith(_OWNED_PREFIX) else None


def request_id(owner: str, seq: int) -> str:
    """The request `seq` of a model or sampling session."""
    return f"{owner}:{seq}"


def unload_id(model: str) -> str:
    """The command that unloads a session's model, the same at each try; a name may be as long as an id."""
    return f"unload-{hashlib.blake2b(model.encode(), digest_size=16).hexdigest()}"


def session_of(name: str) -> str:
    """The session that a model, sampling session or request belongs to."""
    return name.partition(":")[0]


def is_session_model(model: str) -> bool:
    """Whether a model was made in a session, and goes with it."""
    return bool(_SESSION_MODEL.fullmatch(model))


def is_name(text: str) -> bool:
    """Whether the bus can carry this name."""
    return bool(_NAME.fullmatch(text))


def given_name(name: object, seq: int) -> str:
    """The client's name for a checkpoint or version, or one made of `seq` when it gave none. Raises InvalidInput."""
    if name is None:
        return f"{UNNAMED_PREFIX}{seq}"
    if not isinstance(name, str) or not is_name(name) or name.startswith((UNNAMED_PREFIX, EXTERNAL_PREFIX)):
        raise InvalidInput(
            f"{name!r} can't name a checkpoint",
            remedy="Use letters, digits and . _ : @ - (128 at most), a letter or digit first, not 'external.'.",
            field="path",
        )
    return name


def external_name(name: object, seq: int) -> str:
    """Under which name external weights lie that the client calls `name`. Raises InvalidInput."""
    if name is None:
        raise InvalidInput("the field is missing", field="path")
    full = EXTERNAL_PREFIX + given_name(name, seq)
    if not is_name(full):
        raise InvalidInput(f"{name!r} is too long a name", remedy="Use 119 letters at most.", field="path")
    return full


@dataclass(frozen=True)
class TinkerPath:
    """`tinker://model/kind/name`."""

    model: str
    kind: PathKind
    name: str

    @property
    def place(self) -> str:
        """The checkpoint or version on the bus."""
        return f"{self.model}/{self.stored.name}"

    @property
    def stored(self) -> TinkerPath:
        """As what it lies on the disk: itself, or the version that external weights are."""
        if self.kind != "external_weights":
            return self
        return TinkerPath(self.model, "sampler_weights", EXTERNAL_PREFIX + self.name)

    @property
    def shown(self) -> TinkerPath:
        """As what its client knows it; the inverse of `stored`."""
        if self.kind != "sampler_weights" or not self.name.startswith(EXTERNAL_PREFIX):
            return self
        return TinkerPath(self.model, "external_weights", self.name.removeprefix(EXTERNAL_PREFIX))

    @property
    def checkpoint_id(self) -> str:
        """`kind/name`, which names it within its model."""
        return f"{self.kind}/{self.name}"

    def __str__(self) -> str:
        return f"tinker://{self.model}/{self.kind}/{self.name}"


def parse_path(text: object, *kinds: PathKind) -> TinkerPath:
    """The parts of a path of one of these kinds (none given: of any). Raises InvalidInput."""
    found = _PATH.fullmatch(text) if isinstance(text, str) else None
    for kind in kinds or KINDS:
        if found and found[2] == kind and is_name(found[1]) and is_name(found[3]):
            return TinkerPath(found[1], kind, found[3])
    raise InvalidInput(
        f"{text!r} is not such a path",
        remedy=f"Use tinker://MODEL/{' or '.join(kinds or KINDS)}/NAME as a save returned it.",
        field="path",
    )

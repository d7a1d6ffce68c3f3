"""Names of every key on the bus. One hash tag per bus keeps it all in one slot, so a script may touch any key."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tinsmith.bus.protocol.errors import StartupError

_BUS = re.compile(r"^[A-Za-z0-9._-]{1,64}$")


@dataclass(frozen=True)
class Keys:
    """The key names of one bus. The last part of a model's key is fixed, so no model's name can collide."""

    bus: str

    def __post_init__(self) -> None:
        if not _BUS.fullmatch(self.bus):
            raise StartupError(
                f"bus name {self.bus!r} is not valid", remedy="Use letters, digits and . _ - (64 at most)."
            )

    @property
    def prefix(self) -> str:
        """What every key of this bus begins with."""
        return "{" + self.bus + "}:"

    @property
    def pattern(self) -> str:
        """Glob that matches every key of this bus."""
        return self.prefix + "*"

    def _of(self, name: str) -> str:
        return self.prefix + name

    @property
    def incarnation(self) -> str:
        """string: random id of this life of the server's data."""
        return self._of("inc")

    @property
    def version(self) -> str:
        """string: version of this protocol."""
        return self._of("ver")

    @property
    def epoch(self) -> str:
        """string: the last epoch given to any owner of any model."""
        return self._of("epoch")

    @property
    def models(self) -> str:
        """set: models that have queues (unloaded ones until they are freed)."""
        return self._of("models")

    @property
    def bell(self) -> str:
        """stream, capped: {m: model} for every command that became ready. A hint only."""
        return self._of("bell")

    @property
    def event_bell(self) -> str:
        """stream, capped: {m: model} for every event. A hint only."""
        return self._of("ebell")

    @property
    def door(self) -> str:
        """stream: commands of foreign programs, waiting to be admitted."""
        return self._of("door")

    @property
    def dead(self) -> str:
        """stream: commands given up, with the reason."""
        return self._of("dead")

    @property
    def status(self) -> str:
        """string: what the service says of itself; expires unless it is renewed."""
        return self._of("status")

    @property
    def record_prefix(self) -> str:
        """Prefix of the records of commands."""
        return self._of("c:")

    @property
    def blob_prefix(self) -> str:
        """Prefix of the blobs."""
        return self._of("b:")

    def record(self, command: str) -> str:
        """hash: state, seq, digest, event, result of one command."""
        return self.record_prefix + command

    def blob(self, blob: str) -> str:
        """hash: chunk number -> bytes."""
        return self.blob_prefix + blob

    def inbox(self, client: str) -> str:
        """stream: replies to one process."""
        return self._of("in:" + client)

    def commands(self, model: str) -> str:
        """stream: the model's commands."""
        return self._of(f"m:{model}:cmd")

    def meta(self, model: str) -> str:
        """hash: the model's position, owner and lease."""
        return self._of(f"m:{model}:meta")

    def parked(self, model: str) -> str:
        """hash: seq -> command id of commands that came early."""
        return self._of(f"m:{model}:parked")

    def events(self, model: str) -> str:
        """stream: the model's events."""
        return self._of(f"m:{model}:evt")

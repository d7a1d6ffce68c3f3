"""What a replica of the HTTP gateway is told when it is made."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tinsmith.api.http.tenancy.names import PathKind, root_of
from tinsmith.bus.protocol.errors import InvalidInput


class HttpSettings(BaseModel):
    """One service as its HTTP gateway sees it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bus_url: str
    bus: str
    alias: str
    """The base model's name on the bus."""
    aliases: tuple[str, ...] = ()
    """More names by which clients may ask for it."""
    model_path: str
    state_dir: str
    api_keys: tuple[str, ...] = ()
    """Keys that are let in; none: any key is, and each is a tenant of its own."""
    poll_seconds: float = 30.0
    """How long a request for a result is held; clients give up after 45."""
    keep_seconds: float = 300.0
    """How long a result that was fetched can be fetched again."""
    session_seconds: float = 900.0
    """A session is over when its client was silent for so long ..."""
    finished_seconds: float = 60.0
    """... or so long after it said good-bye."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of the base model."""
        return tuple(dict.fromkeys((*self.aliases, self.alias)))

    def base(self, name: object) -> str:
        """The name itself, when it is one of the base model's. Raises InvalidInput."""
        if not isinstance(name, str) or name not in self.names:
            raise InvalidInput(
                f"this service holds {', '.join(map(repr, self.names))}, not {name!r}",
                remedy="Ask for one of those.",
                field="base_model",
            )
        return name

    def folder(self, kind: PathKind, place: str) -> Path:
        """Where a checkpoint (`weights`) or published version (`sampler_weights`) `model/name` lies."""
        return Path(self.state_dir) / root_of(kind) / place

    @property
    def tokenizer(self) -> str | None:
        """A folder from which clients on this machine can load the tokenizer; None when it has none."""
        folder = Path(self.model_path)
        files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
        return str(folder) if any((folder / file).is_file() for file in files) else None

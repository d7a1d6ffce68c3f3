"""What the HTTP gateway remembers of sessions, models, samplers and saves; small, and written once where it can be."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tinsmith.bus.protocol.commands import LoraSpec

DEFAULT_PROJECT = "default"
"""Of a session whose client named none."""


class Record(BaseModel):
    """Base of all records: JSON in the store, immutable in a program."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class SessionRecord(Record):
    """One client process, or several that share it."""

    owner: str
    """Of the API key that made it; see auth."""
    created: float
    """Unix seconds, like every time here."""
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    project: str = DEFAULT_PROJECT
    """As its client said at first; it may have been moved since, see Store.project."""


class FinishRecord(Record):
    """How a client said good-bye."""

    reason: Literal["success", "errored", "interrupted"] = "success"
    detail: str | None = None


class ModelRecord(Record):
    """One training run. It outlives its model, as long as it has checkpoints."""

    owner: str
    created: float
    base: str
    """As the client called it."""
    lora: LoraSpec
    user_metadata: dict[str, Any] | None = None


class SamplerRecord(Record):
    """One sampling session: which weights it samples from."""

    owner: str
    base: str
    version: str
    """`base`, or `model/name` on the bus."""
    model_path: str | None = None


class SaveRecord(Record):
    """What the client said of one checkpoint or version; whether it exists is for the disk to say."""

    seq: int
    at: float
    expires_at: float | None = None
    user_metadata: dict[str, str] | None = None
    public: bool = False

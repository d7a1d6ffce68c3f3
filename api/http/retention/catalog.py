"""Checkpoints and published versions as they lie on the disk, with what their clients said of them.

The disk decides what exists: a folder is whole or absent. The store only annotates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tinsmith.api.http.retention.leftovers import delete_folder, replaced
from tinsmith.api.http.settings import HttpSettings
from tinsmith.api.http.tenancy.names import STORED_KINDS, UNNAMED_PREFIX, PathKind, TinkerPath
from tinsmith.api.http.tenancy.records import ModelRecord, SaveRecord

TYPES: dict[PathKind, str] = {"weights": "training", "sampler_weights": "sampler"}


@dataclass(frozen=True)
class Saved:
    """One checkpoint or version that exists."""

    path: TinkerPath
    at: float
    """Unix seconds when it was complete."""
    size: int
    """Bytes of all its files."""
    record: SaveRecord | None
    """What its client said; None for one that was made at another gateway."""

    def as_json(self) -> dict[str, Any]:
        """A Checkpoint of the Tinker API."""
        record = self.record
        return {
            "checkpoint_id": self.path.checkpoint_id,
            "checkpoint_type": TYPES[self.path.kind],
            "time": iso(self.at),
            "tinker_path": str(self.path),
            "size_bytes": self.size,
            "public": record is not None and record.public,
            "user_metadata": record.user_metadata if record else None,
            "expires_at": iso(record.expires_at) if record and record.expires_at is not None else None,
        }


def iso(seconds: float) -> str:
    """Unix seconds as an ISO time in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def saved(settings: HttpSettings, model: str, saves: Mapping[str, Sequence[SaveRecord]]) -> list[Saved]:
    """All that exists of a model, oldest first; versions that its client did not name are its samplers' own."""
    found = []
    for path in _named(settings, model):
        one = look(settings, path, saves.get(path.checkpoint_id, ()))
        if one is not None:
            found.append(one)
    return sorted(found, key=lambda one: one.at)


def look(settings: HttpSettings, path: TinkerPath, records: Sequence[SaveRecord]) -> Saved | None:
    """One checkpoint or version, with the one of its records that it is from; None when it does not exist."""
    place = settings.folder(path.kind, path.place)
    try:
        at = place.stat().st_mtime
        size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    except FileNotFoundError:
        return None  # Never there, or deleted this moment.
    return Saved(path, at, size, effective(records, _seq(place)))


def has_saves(settings: HttpSettings, model: str) -> bool:
    """Whether any checkpoint or version that a client named exists of a model."""
    return any(True for _ in _named(settings, model))


def _named(settings: HttpSettings, model: str) -> Iterator[TinkerPath]:
    for kind in STORED_KINDS:
        folder = settings.folder(kind, model)
        for place in folder.iterdir() if folder.is_dir() else ():
            unnamed = kind == "sampler_weights" and place.name.startswith(UNNAMED_PREFIX)
            if not place.name.startswith(".") and not unnamed and place.is_dir():
                yield TinkerPath(model, kind, place.name)


def effective(records: Sequence[SaveRecord], seq: int | None) -> SaveRecord | None:
    """Which of several saves under one name the folder is from: that of command `seq`, where the folder tells it; else
    the first, because a name that is taken is not given twice. Pure."""
    for record in records:
        if record.seq == seq:
            return record
    return records[0] if records else None


def _seq(folder: Path) -> int | None:
    try:
        return int(json.loads((folder / "meta.json").read_text())["user"]["seq"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # Published versions, which others' programs load, carry no description of ours.


def remove(settings: HttpSettings, path: TinkerPath) -> bool:
    """Delete a checkpoint or version; False when there is none.

    A sampler that has read it goes on to the end of what it samples; whoever asks for it from now on is refused.
    """
    place = settings.folder(path.kind, path.place)
    # What a writer that died was about to replace must not come back in its place.
    delete_folder(replaced(place))
    return delete_folder(place)


def remove_unnamed(settings: HttpSettings, model: str, held: frozenset[str]) -> None:
    """Delete the versions that only a session's own samplers could name, but for those `held` (model/name)."""
    folder = settings.folder("sampler_weights", model)
    for place in list(folder.iterdir()) if folder.is_dir() else ():
        if place.name.startswith(UNNAMED_PREFIX) and f"{model}/{place.name}" not in held:
            remove(settings, TinkerPath(model, "sampler_weights", place.name))


def run_as_json(model: str, record: ModelRecord, last_request: float, all_saved: Sequence[Saved]) -> dict[str, Any]:
    """A TrainingRun of the Tinker API."""
    newest = {one.path.kind: one.as_json() for one in all_saved}
    return {
        "training_run_id": model,
        "base_model": record.base,
        "model_owner": record.owner,
        "is_lora": record.lora is not None,
        "lora_rank": record.lora.rank if record.lora is not None else None,
        "corrupted": False,
        "last_request_time": iso(last_request),
        "last_checkpoint": newest.get("weights"),
        "last_sampler_checkpoint": newest.get("sampler_weights"),
        "user_metadata": {key: str(value) for key, value in (record.user_metadata or {}).items()} or None,
    }

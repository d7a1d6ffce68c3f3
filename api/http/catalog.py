"""Checkpoints and published versions as they lie on the disk, with what their clients said of them.

The disk decides what exists: a folder is whole or absent. The store only annotates.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tinsmith.api.http.names import UNNAMED_PREFIX, PathKind, TinkerPath
from tinsmith.api.http.records import ModelRecord, SaveRecord
from tinsmith.api.http.settings import HttpSettings

KINDS: tuple[PathKind, ...] = ("weights", "sampler_weights")
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
    """What its client said; None for one that was made at another door."""

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
    for kind in KINDS:
        folder = settings.folder(kind, model)
        for place in folder.iterdir() if folder.is_dir() else ():
            unnamed = kind == "sampler_weights" and place.name.startswith(UNNAMED_PREFIX)
            if place.name.startswith(".") or unnamed or not place.is_dir():
                continue
            path = TinkerPath(model, kind, place.name)
            size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
            record = effective(saves.get(path.checkpoint_id, ()), _seq(place))
            found.append(Saved(path, place.stat().st_mtime, size, record))
    return sorted(found, key=lambda one: one.at)


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
    """Delete a checkpoint or version; False when there is none."""
    folder = settings.folder(path.kind, path.place)
    if not folder.is_dir():
        return False
    # Renamed first, so that whoever lists or loads meanwhile never finds half of it.
    gone = folder.with_name(f".{folder.name}.deleted")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone)
    return True


def remove_unnamed(settings: HttpSettings, model: str) -> None:
    """Delete the versions that only a session's own samplers could name."""
    folder = settings.folder("sampler_weights", model)
    for place in list(folder.iterdir()) if folder.is_dir() else ():
        if place.name.startswith(UNNAMED_PREFIX):
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

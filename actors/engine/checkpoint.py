"""Directories that are either complete or absent: checkpoints, snapshots and published versions.

Invariants: a directory is written under a temporary name, every file and the directory are flushed to disk, and only
then it gets its name; `checksums.json` names every other file with its SHA-256; `read` returns nothing that does not
match it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from tinsmith.bus.errors import DamagedCheckpoint, UnknownVersion

CHECKSUMS = "checksums.json"
META = "meta.json"
TENSORS = "tensors.safetensors"
FORMAT = 1


def write_directory(path: Path, fill: Callable[[Path], None]) -> None:
    """Make `path` whole or not at all: `fill` writes the files into the directory it is given.

    An existing `path` is replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.writing")
    old = path.with_name(f".{path.name}.replaced")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    fill(fresh)
    files = sorted(p for p in fresh.rglob("*") if p.is_file())
    sums = {str(p.relative_to(fresh)): _sha256(p) for p in files}
    (fresh / CHECKSUMS).write_text(json.dumps(sums, indent=1))
    for place in (*files, fresh / CHECKSUMS, fresh):
        _flush(place)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
    os.rename(fresh, path)
    _flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def verify_directory(path: Path) -> None:
    """Raises UnknownVersion when there is no such directory, DamagedCheckpoint when a file is not as written."""
    if not path.is_dir():
        raise UnknownVersion(f"there is no checkpoint at {path}", remedy="Name one that was saved.")
    try:
        sums: dict[str, str] = json.loads((path / CHECKSUMS).read_text())
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{path / CHECKSUMS} can't be read: {error}", remedy="Use another one.") from error
    for name, expected in sums.items():
        file = path / name
        if not file.is_file() or _sha256(file) != expected:
            raise DamagedCheckpoint(f"{file} is missing or not as it was written", remedy="Use another checkpoint.")


def write(path: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """One checkpoint: named CPU tensors, and a JSON-able description."""

    def fill(directory: Path) -> None:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / TENSORS)
        (directory / META).write_text(json.dumps({"format": FORMAT, **meta}, indent=1, sort_keys=True))

    write_directory(path, fill)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write` wrote, verified. Raises UnknownVersion or DamagedCheckpoint."""
    verify_directory(path)
    return load_file(path / TENSORS), read_meta(path)


def read_meta(path: Path) -> dict[str, Any]:
    """The description alone, without reading the tensors. Raises UnknownVersion or DamagedCheckpoint."""
    if not path.is_dir():
        raise UnknownVersion(f"there is no checkpoint at {path}", remedy="Name one that was saved.")
    try:
        meta: dict[str, Any] = json.loads((path / META).read_text())
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{path / META} can't be read: {error}", remedy="Use another checkpoint.") from error
    if meta.pop("format", None) != FORMAT:
        raise DamagedCheckpoint(f"{path} is not in format {FORMAT}", remedy="Use the release that wrote it.")
    return meta


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

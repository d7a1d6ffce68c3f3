"""Directories that are either complete or absent: checkpoints, snapshots and published versions.

Invariants: a directory is written under a temporary name, every file and the directory are flushed to disk, and only
then it gets its name; `checksums.json` names every other file with its SHA-256; `read` returns nothing that does not
match it; a write that fails leaves nothing behind, and what stood there before as it was.

Temporary names are `.<name>.writing` (half written), `.<name>.replaced` (whole, until its successor has the name) and
`.<name>.<id>.deleted`; a crash can leave one, which whoever sweeps the state folder takes away.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinsmith.bus.protocol.errors import DamagedCheckpoint, DiskFull, TinsmithError, UnknownVersion

CHECKSUMS = "checksums.json"
META = "meta.json"
TENSORS = "tensors.safetensors"
FORMAT = 1
SPARE_BYTES = 1 << 20
"""Left free by every write: for descriptions, tokenizer files, and whoever else writes there."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_MAKE_ROOM = (
    "Nothing was written. Free space (delete checkpoints and versions, or give them a time to live), or serve on a "
    "larger disk; then do it again."
)


def write_directory(path: Path, fill: Callable[[Path], None], size: int = 0) -> None:
    """Make `path` whole or not at all: `fill` writes the files into the directory it is given.

    An existing `path` is replaced. `size`: about how many bytes `fill` will write. Raises DiskFull, before anything is
    written when that much is not free, and when the disk fills up meanwhile.
    """
    fresh = path.with_name(f".{path.name}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(fresh, ignore_errors=True)
        require_space(path, size)
        fresh.mkdir()
        fill(fresh)
        files = sorted(p for p in fresh.rglob("*") if p.is_file())
        sums = {str(p.relative_to(fresh)): _sha256(p) for p in files}
        (fresh / CHECKSUMS).write_text(json.dumps(sums, indent=1))
        for place in (*files, fresh / CHECKSUMS, fresh):
            _flush(place)
        _give_name(fresh, path)
    except BaseException as error:
        shutil.rmtree(fresh, ignore_errors=True)
        if (full := _disk_full(path, error)) is not None:
            raise full from error
        raise


def _give_name(fresh: Path, path: Path) -> None:
    old = path.with_name(f".{path.name}.replaced")
    replaces = path.exists()
    if replaces:
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
    try:
        os.rename(fresh, path)
    except BaseException:
        if replaces:
            os.rename(old, path)
        raise
    _flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def require_space(path: Path, size: int) -> None:
    """Raises DiskFull when the disk on which `path` will lie has no room for `size` bytes (and some to spare)."""
    free = shutil.disk_usage(path.parent).free
    if size + SPARE_BYTES > free:
        raise DiskFull(
            f"{path} needs about {(size + SPARE_BYTES) / 1e6:.1f} MB, the disk has {free / 1e6:.1f} MB free",
            remedy=_MAKE_ROOM,
        )


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """How much the tensors' values take in a file, bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


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


def write(path: Path, tensors: Mapping[str, Tensor], meta: dict[str, Any]) -> None:
    """One checkpoint: named CPU tensors, and a JSON-able description. Raises DiskFull."""

    def fill(directory: Path) -> None:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / TENSORS)
        (directory / META).write_text(json.dumps({"format": FORMAT, **meta}, indent=1, sort_keys=True))

    write_directory(path, fill, bytes_of(tensors.values()))


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


def _disk_full(path: Path, error: BaseException) -> DiskFull | None:
    """The typed error for one that says that no more can be written; None for any other."""
    if isinstance(error, TinsmithError):
        return None
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, SafetensorError) and (told := _OS_ERROR.search(str(error))):
        number = int(told[1])  # It carries the system's error in its text alone.
    if number not in _FULL:
        return None
    remedy = "Raise the limit on the size of files (ulimit -f)." if number == errno.EFBIG else _MAKE_ROOM
    return DiskFull(f"{path} could not be written: {os.strerror(number)}", remedy=remedy)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""How much of the disk a service's state takes, measured now and then by a thread of its own."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from pathlib import Path

log = logging.getLogger("tinsmith.disk")

WALK_SECONDS = 60.0
"""Pause between two walks through the state folder ..."""
WALK_SHARE = 0.02
"""... or longer, so that walking takes at most this share of the time."""
FOLDERS = {"checkpoints": "checkpoints", "versions": "published", "snapshots": "snapshots"}
"""What is told -> its folder in the state directory."""


def measure(state_dir: Path) -> dict[str, int]:
    """Bytes of the files of each kind, half-written ones included, and bytes that the disk has free. Raises OSError."""
    used = {f"{name}_bytes": _size(state_dir / folder) for name, folder in FOLDERS.items()}
    return {**used, "free_bytes": shutil.disk_usage(state_dir).free}


class DiskReport:
    """The last measurement, and when to make the next one. The first begins at once; `latest` never waits for it."""

    def __init__(self, state_dir: str | Path) -> None:
        self._state = Path(state_dir)
        self._found: dict[str, int | float] = {}
        self._due = 0.0
        self._walk: threading.Thread | None = None
        self.latest()

    def latest(self) -> dict[str, int | float]:
        """As `measure`, with `at` (Unix seconds); empty before the first walk has ended. Begins one when it is due."""
        if time.monotonic() >= self._due and (self._walk is None or not self._walk.is_alive()):
            self._walk = threading.Thread(target=self._measure, name="disk-report", daemon=True)
            self._walk.start()
        return dict(self._found)

    def _measure(self) -> None:
        begun = time.monotonic()
        try:
            self._found = {**measure(self._state), "at": time.time()}
        except OSError as error:
            # What was found last stands, with its time; a disk that can't be read shows elsewhere first.
            log.warning("the state folder can't be measured: %s", error)
        now = time.monotonic()
        self._due = now + max(WALK_SECONDS, (now - begun) / WALK_SHARE)


def _size(folder: Path) -> int:
    """Bytes of all files below; what goes away meanwhile counts nothing, a file of many names once."""
    total = 0
    seen: set[int] = set()
    left = [folder]
    while left:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        left.append(Path(entry.path))
                    elif entry.is_file(follow_symlinks=False):
                        stat = entry.stat(follow_symlinks=False)
                        if stat.st_nlink > 1:
                            if stat.st_ino in seen:
                                continue
                            seen.add(stat.st_ino)
                        total += stat.st_size
        except FileNotFoundError:
            continue
    return total

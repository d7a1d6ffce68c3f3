"""Where a service's bus is: an address given, one in the environment, or the one a local service left in its state."""

from __future__ import annotations

import os
from pathlib import Path

from tinsmith.bus.protocol.errors import BusUnreachable

URL_FILE = "bus.url"
"""File in a state directory that holds the bus's address while a service runs on it."""


def default_state() -> Path:
    """$TINSMITH_STATE, or `tinsmith` in the user's state folder."""
    given = os.environ.get("TINSMITH_STATE")
    return Path(given) if given else Path.home() / ".local" / "state" / "tinsmith"


def default_cache() -> Path:
    """`tinsmith` in the user's cache folder: what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tinsmith"


def resolve_url(url: str | os.PathLike[str] | None = None) -> str:
    """The bus's URL: `url` (a redis:// or unix:// URL, or a service's state directory), else $REDIS_URL, else the
    local service's. Raises BusUnreachable that says what to start."""
    if url is None:
        url = os.environ.get("REDIS_URL") or default_state()
    text = os.fspath(url)
    if "://" in text:
        return text
    file = Path(text) / URL_FILE
    try:
        return file.read_text().strip()
    except OSError:
        raise BusUnreachable(
            f"no service has left its address in {text}",
            remedy="Start one with `tinsmith serve --model PATH --state DIR`, or give a redis:// URL.",
        ) from None

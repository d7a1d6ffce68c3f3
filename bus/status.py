"""A service's word on itself, kept on the bus for whoever can reach it."""

from __future__ import annotations

from typing import Any

from tinsmith.bus.bus import Bus
from tinsmith.bus.protocol.codec import decode, encode


async def put_status(bus: Bus, status: dict[str, Any], seconds: float) -> None:
    """Replace the service's status; it is gone after `seconds` unless it is put again."""
    key = bus.session.keys.status
    await bus.session.call(("SET", key, encode(status), "PX", int(seconds * 1000)))


async def get_status(bus: Bus) -> dict[str, Any] | None:
    """The last status, or None when no service has put one lately."""
    (found,) = await bus.session.call(("GET", bus.session.keys.status))
    return dict(decode(found)) if found is not None else None

"""Opening a bus."""

from __future__ import annotations

from tinsmith.bus.bus import Bus
from tinsmith.bus.ownership import EVENT_CAP, RESULT_SECONDS
from tinsmith.bus.redis.session import Session
from tinsmith.bus.submit import BACKLOG_CAP

DEADLINE_SECONDS = 30.0


async def open_bus(
    url: str,
    bus: str = "tinsmith",
    *,
    connect_seconds: float = 5.0,
    deadline: float = DEADLINE_SECONDS,
    backlog_cap: int = BACKLOG_CAP,
    result_seconds: int = RESULT_SECONDS,
    event_cap: int = EVENT_CAP,
) -> Bus:
    """A Bus on `redis://host:port[/db]` or `unix:///path/to.sock`.

    deadline: seconds within which any later call must be answered, reconnects included. backlog_cap: commands of one
    model that may wait. result_seconds: how long results are kept. event_cap: events kept for each model, about.
    Raises BusUnreachable when nothing answers within `connect_seconds`, StartupError for an address that is none.
    """
    session = Session(url, bus, connect_seconds)
    try:
        await session.begin()
    except BaseException:
        await session.close()
        raise
    session.deadline = deadline
    return Bus(session, backlog_cap=backlog_cap, result_seconds=result_seconds, event_cap=event_cap)

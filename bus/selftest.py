"""The start-up self-test: whatever server is used must be one on which the promises hold."""

from __future__ import annotations

import re

from tinsmith.bus.bus import Bus, Info
from tinsmith.bus.connection import open_bus
from tinsmith.bus.protocol.envelope import Command, Event, Kind, new_id
from tinsmith.bus.protocol.errors import BusError, BusLost, BusUnreachable, UnsafeServer

MINIMUM = (6, 2)


async def self_test(url: str, connect_seconds: float = 5.0) -> Info:
    """What the server is, after it has passed.

    Checks the version, the eviction policy, that the scripts load, and one command's whole way on a scratch bus, which
    is deleted. Raises UnsafeServer with the remedy, BusUnreachable.
    """
    command, reader = new_id(), new_id()
    async with await open_bus(url, f"selftest-{new_id()}", connect_seconds=connect_seconds) as bus:
        try:
            info = await bus.info()
            _check(info)
            await _round_trip(bus, command, reader)
        except (UnsafeServer, BusUnreachable, BusLost):
            raise
        except BusError as error:
            raise UnsafeServer(f"the server failed the self-test: {error}", remedy=error.remedy) from error
        finally:
            await _delete(bus, command, reader)
    return info


def _check(info: Info) -> None:
    found = re.match(r"(\d+)\.(\d+)", info.compatible)
    if found is None or (int(found[1]), int(found[2])) < MINIMUM:
        raise UnsafeServer(
            f"{info.server} {info.version} is too old", remedy="Use Redis >= 6.2 or Valkey, or the embedded server."
        )
    if info.eviction != "noeviction":
        raise UnsafeServer(
            f"maxmemory-policy is {info.eviction or 'unknown'!r}: the server may silently drop accepted commands",
            remedy="Run CONFIG SET maxmemory-policy noeviction, and set it in the server's configuration.",
        )


async def _round_trip(bus: Bus, command_id: str, reader: str) -> None:
    command = Command(id=command_id, model="scratch", kind=Kind.CREATE_MODEL, seq=0)
    async with bus.inbox(reader) as inbox:
        await inbox.submit(command, b"body")
        epoch = await bus.own("scratch", "selftest", 60_000)
        (taken,) = await bus.next("scratch", epoch, 8)
        event = Event(id=command.id, model="scratch", kind=command.kind, seq=0, ok=True)
        await bus.complete("scratch", epoch, taken.entry_id, event, b"result")
        done, body = await inbox.wait(command.id, 5.0)
        if taken.body != b"body" or body != b"result" or done.n != 1:
            raise UnsafeServer("a command did not come back as it was sent", remedy="Use another server.")
        await inbox.drained()


async def _delete(bus: Bus, command: str, reader: str) -> None:
    # By name: looking for the keys by their pattern would walk over everything that the server holds.
    keys = bus.session.keys
    single = [keys.incarnation, keys.version, keys.epoch, keys.models, keys.bell, keys.event_bell]
    scratch = [of("scratch") for of in (keys.commands, keys.meta, keys.parked, keys.events)]
    await bus.session.call(("UNLINK", *single, *scratch, keys.record(command), keys.inbox(reader)))

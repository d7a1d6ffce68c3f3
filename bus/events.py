"""Events of models, live or replayed from any point, with an exact count of those that were missed.

An event's place is `<birth>-<n>`: the model's life (ms of its birth) and the event's number within it, from 1. So any
place tells which event comes next, even when the event at that place has been trimmed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith.bus.ownership import fields_of
from tinsmith.bus.protocol.envelope import Event
from tinsmith.bus.protocol.errors import Gap
from tinsmith.bus.protocol.headers import unpack_event
from tinsmith.bus.redis.session import Session

BLOCK_MS = 1000
PAGE = 256


@dataclass(frozen=True)
class Streamed:
    """One event and its place: `since={model: id}` goes on right after it."""

    event: Event
    model: str
    id: str
    at: float
    """Unix seconds by the server's clock."""


async def read_events(
    session: Session, models: Sequence[str] | None, since: str | Mapping[str, str] = "$"
) -> AsyncIterator[Streamed | Gap]:
    """Events of `models` (None: all, new ones join as they appear), in order within each model; never ends.

    since: `0` all that is kept, `$` from now on, or by model an id (models not named: `0`). Where events are missing a
    Gap stands in their place: `missed` says how many, `model` whose. Raises BusUnreachable, BusLost.
    """
    wire = session.new_wire()
    try:
        bell = await _last_id(session, session.keys.event_bell)
        names = list(models) if models is not None else await _all_models(session)
        places = {name: await _start(session, name, since) for name in names}
        due = set(places)
        while True:
            if models is None:
                for name in await _all_models(session):
                    if name not in places:
                        places[name] = await _birth(session, name)
                        due.add(name)
            while due:
                # One page a model and round: a long replay of one does not hold up the others.
                for name, page in (await _pages(session, {name: places[name] for name in due})).items():
                    for item in _checked(name, places[name], page):
                        if isinstance(item, Streamed):
                            places[name] = item.id
                        yield item
                    if len(page) < PAGE:
                        due.discard(name)
            command = ("XREAD", "COUNT", 1000, "BLOCK", BLOCK_MS, "STREAMS", session.keys.event_bell, bell)
            reply = await session.block(wire, BLOCK_MS, *command)
            if reply:
                bell = reply[0][1][-1][0].decode()
                due = {fields_of(entry)["m"].decode() for entry in reply[0][1]}
                due = due & set(places) if models is not None else due
                due |= set() if len(reply[0][1]) < 500 else set(places)  # A capped bell may have lost some.
                due = {name for name in due if name in places}
            else:
                await session.check_life()
                due = set(places)
    finally:
        await session.close_wire(wire)


def _checked(model: str, place: str, page: Sequence[Any]) -> list[Streamed | Gap]:
    """The events of a page of entries after `place`, with a Gap wherever numbers are missing. Pure."""
    birth, n = _parts(place)
    items: list[Streamed | Gap] = []
    for entry in page:
        found_birth, found = _parts(entry[0].decode())
        missed = found - 1 - (n if found_birth == birth else 0)
        if missed > 0:
            items.append(
                Gap(
                    f"{missed} events before number {found} are no longer kept",
                    missed=missed,
                    remedy="Read more often, or fetch results by command id.",
                    model=model,
                )
            )
        fields = fields_of(entry)
        event = unpack_event(fields["header"], int(fields["n"]), int(fields["seq"]))
        items.append(Streamed(event, model, entry[0].decode(), int(fields["at"]) / 1000))
        birth, n = found_birth, found
    return items


def _parts(place: str) -> tuple[int, int]:
    birth, _, n = place.partition("-")
    return int(birth), int(n or 0)


async def _pages(session: Session, places: Mapping[str, str]) -> dict[str, Any]:
    keys = [session.keys.events(name) for name in places]
    (reply,) = await session.call(("XREAD", "COUNT", PAGE, "STREAMS", *keys, *places.values()))
    found = {stream.decode(): entries for stream, entries in reply or []}
    return {name: found.get(key, []) for name, key in zip(places, keys, strict=True)}


async def _all_models(session: Session) -> list[str]:
    (members,) = await session.call(("SMEMBERS", session.keys.models))
    return sorted(member.decode() for member in members)


async def _start(session: Session, model: str, since: str | Mapping[str, str]) -> str:
    place = since if isinstance(since, str) else since.get(model, "0")
    return await _last_id(session, session.keys.events(model)) if place == "$" else place


async def _birth(session: Session, model: str) -> str:
    (born,) = await session.call(("HGET", session.keys.meta(model), "born"))
    return f"{int(born or 0)}-0"


async def _last_id(session: Session, key: str) -> str:
    (last,) = await session.call(("XREVRANGE", key, "+", "-", "COUNT", 1))
    return last[0][0].decode() if last else "0-0"

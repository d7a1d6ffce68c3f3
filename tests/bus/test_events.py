"""Events: replayed and live, in order, with an exact count of what is missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from tinsmith.bus.bus import Bus
from tinsmith.bus.connection import open_bus
from tinsmith.bus.events import Streamed
from tinsmith.bus.protocol.errors import Gap


async def run(bus: Bus, h: Any, epoch: int, count: int, model: str = "m") -> None:
    for _ in range(count):
        await bus.submit(h.command(model))
    for taken in await bus.next(model, epoch, count):
        await bus.complete(model, epoch, taken.entry_id, h.event(taken, metrics={"loss": float("nan")}))


async def take(events: AsyncIterator[Any], count: int) -> list[Any]:
    async with asyncio.timeout(10):
        return [await anext(events) for _ in range(count)]


async def test_events_are_replayed_and_then_live(bus: Bus, coordinator: Bus, h: Any) -> None:
    epoch = await h.create(coordinator)
    await run(coordinator, h, epoch, 3)
    async with aclosing(bus.events(["m"], "0")) as events:
        first = await take(events, 4)
        assert [item.event.n for item in first] == [1, 2, 3, 4]
        assert [item.event.seq for item in first] == [0, 1, 2, 3]
        live = asyncio.create_task(take(events, 2))
        await run(coordinator, h, epoch, 2)
        assert [item.event.n for item in await live] == [5, 6]
    async with aclosing(bus.events(["m"], {"m": first[1].id})) as events:
        assert [item.event.n for item in await take(events, 4)] == [3, 4, 5, 6]
    async with aclosing(bus.events(["m"])) as events:
        live = asyncio.create_task(take(events, 1))
        await bus.session.check_life()
        await asyncio.sleep(0.05)  # The reader fixes its "from now on" first.
        await run(coordinator, h, epoch, 1)
        assert [item.event.n for item in await live] == [7]


async def test_missed_events_are_counted_exactly(url: str, bus: Bus, h: Any) -> None:
    async with await open_bus(url, bus.session.keys.bus, event_cap=5) as short:
        epoch = await h.create(short)
        async with aclosing(bus.events(["m"], "0")) as events:
            (first,) = await take(events, 1)
            await run(short, h, epoch, 250)
            (gap, then) = await take(events, 2)
            assert isinstance(gap, Gap)
            assert isinstance(then, Streamed)
            assert gap.missed == then.event.n - 2 > 0
            assert gap.model == "m"
        async with aclosing(bus.events(["m"], "0")) as events:
            gap, then = await take(events, 2)
            assert gap.missed == then.event.n - 1
        async with aclosing(bus.events(["m"], {"m": first.id})) as events:
            gap, then = await take(events, 2)
            assert gap.missed == then.event.n - 2


async def test_new_models_join_a_reader_of_all(bus: Bus, coordinator: Bus, h: Any) -> None:
    old = await h.create(coordinator, "old")
    async with aclosing(bus.events(None, "0")) as events:
        await take(events, 1)
        waiting = asyncio.create_task(take(events, 4))
        new = await h.create(coordinator, "new")
        await run(coordinator, h, new, 1, "new")
        await run(coordinator, h, old, 2, "old")
        got = {(item.model, item.event.n) for item in await waiting}
    assert got == {("new", 1), ("new", 2), ("old", 2), ("old", 3)}


async def test_a_model_created_again_starts_to_count_anew_without_a_gap(bus: Bus, coordinator: Bus, h: Any) -> None:
    epoch = await h.create(coordinator)
    await run(coordinator, h, epoch, 2)
    await coordinator.remove_model("m", epoch)
    epoch = await h.create(coordinator)
    async with aclosing(bus.events(["m"], "0")) as events:
        assert [item.event.n for item in await take(events, 4)] == [1, 2, 3, 1]

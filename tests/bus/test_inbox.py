"""Waiting for results: none is missed, none goes to another, and lost data is told."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tinsmith.bus.bus import Bus
from tinsmith.bus.connection import open_bus
from tinsmith.bus.protocol.envelope import SAMPLE_LANE, Kind
from tinsmith.bus.protocol.errors import (
    BusUnreachable,
    CommandConflict,
    DeadlineExceeded,
    ProtocolError,
    UnknownCommand,
)
from tinsmith.bus.protocol.parts import Part


async def done(bus: Bus, h: Any, epoch: int, count: int = 1, body: bytes = b"") -> None:
    """Take and complete the next `count` commands of m."""
    for taken in await bus.next("m", epoch, count):
        await bus.complete("m", epoch, taken.entry_id, h.event(taken), body or taken.body)


async def test_a_result_that_came_while_the_connection_was_down_is_delivered(bus: Bus, proxy: Any, h: Any) -> None:
    epoch = await h.create(bus)
    async with await open_bus(f"unix://{proxy.path}", bus.session.keys.bus) as remote, remote.inbox() as inbox:
        for round_ in range(3):
            one = h.command()
            await inbox.submit(one, b"%d" % round_)
            waiting = asyncio.create_task(inbox.wait(one.id, 5))
            proxy.drop_all()
            await done(bus, h, epoch)
            assert (await waiting)[1] == b"%d" % round_


async def test_a_half_open_connection_is_seen_and_no_result_is_lost(bus: Bus, proxy: Any, h: Any) -> None:
    epoch = await h.create(bus)
    async with await open_bus(f"unix://{proxy.path}", bus.session.keys.bus) as remote, remote.inbox() as inbox:
        first, one = h.command(), h.command()
        await inbox.submit(first)
        await done(bus, h, epoch)
        await inbox.wait(first.id, 5)
        await inbox.submit(one)
        proxy.freeze_all()
        began = time.monotonic()
        await done(bus, h, epoch)
        assert (await inbox.wait(one.id, 10))[0].ok
        assert time.monotonic() - began < 5


async def test_waiters_get_their_own_results_whatever_others_are_cancelled(bus: Bus, coordinator: Bus, h: Any) -> None:
    epoch = await h.create(coordinator)
    commands = [h.command(seq=seq) for seq in range(1, 61)]
    async with bus.inbox() as inbox:
        calls = [asyncio.create_task(inbox.call(one, one.id.encode(), deadline=10)) for one in commands]
        for at, call in enumerate(calls):
            # Each at another point of its way: some before their submit was sent, some in the wait for the result.
            await asyncio.sleep(0)
            if at % 3 == 0:
                call.cancel()
        while (await bus.meta("m"))["seq"] != "60":
            # A cancelled call may not have been sent; its place is taken by the same command again.
            for one in commands:
                await bus.submit(one, one.id.encode())
        await done(coordinator, h, epoch, 60)
        for one, call in zip(commands, calls, strict=True):
            if call.cancelled() or call.cancelling():
                continue
            result, body = await call
            assert (result.id, body) == (one.id, one.id.encode())


async def test_a_command_of_another_client_can_be_waited_for(bus: Bus, coordinator: Bus, h: Any) -> None:
    epoch = await h.create(coordinator)
    one, two = h.command(), h.command()
    await coordinator.submit(one, b"one")
    await coordinator.submit(two, bytes(400_000))
    async with bus.inbox() as inbox:
        waiting = [asyncio.create_task(inbox.wait(c.id, 5)) for c in (one, two)]
        await bus.session.call(("PING",))
        await done(coordinator, h, epoch, 2)
        assert [len(body) for _, body in await asyncio.gather(*waiting)] == [3, 400_000]


async def test_a_body_stays_until_its_last_reader_has_it(bus: Bus, coordinator: Bus, h: Any) -> None:
    epoch = await h.create(coordinator)
    one = h.command()
    async with bus.inbox() as left, coordinator.inbox() as right:
        await left.submit(one, bytes(400_000))
        await right.submit(one, bytes(400_000))
        await done(coordinator, h, epoch)
        (_, a), (_, b) = await asyncio.gather(left.wait(one.id, 5), right.wait(one.id, 5))
        assert len(a) == len(b) == 400_000


async def test_the_reply_stream_is_emptied(bus: Bus, coordinator: Bus, h: Any) -> None:
    epoch = await h.create(coordinator)
    inbox = bus.inbox()
    for _ in range(5):
        one = h.command()
        await inbox.submit(one, b"x")
        await done(coordinator, h, epoch)
        await inbox.wait(one.id, 5)
    await inbox.drained()
    left, record = await bus.session.call(
        ("XLEN", bus.session.keys.inbox(inbox.name)), ("HMGET", bus.session.keys.record(one.id), "rbody", "state")
    )
    assert left == 0
    assert record == [None, b"done"]
    (ttl,) = await bus.session.call(("TTL", bus.session.keys.record(one.id)))
    assert 0 < ttl <= 3600
    await inbox.close()


async def test_deadlines_and_unknown_ids_have_their_types(bus: Bus, h: Any) -> None:
    await h.create(bus)
    async with bus.inbox() as inbox:
        with pytest.raises(UnknownCommand):
            await inbox.wait("absent", 5)
        one = h.command()
        await inbox.submit(one)
        with pytest.raises(DeadlineExceeded):
            await inbox.wait(one.id, 0.01)
        waiting = asyncio.create_task(inbox.wait(one.id))
        await asyncio.sleep(0)
    with pytest.raises(BusUnreachable):
        await waiting
    assert await bus.result(one.id) is None
    assert await bus.result("absent") is None


async def test_five_hundred_concurrent_samples_need_no_pool(bus: Bus, coordinator: Bus, h: Any) -> None:
    async with bus.inbox() as inbox:
        commands = [h.command(SAMPLE_LANE, Kind.SAMPLE) for _ in range(512)]
        calls = [asyncio.create_task(inbox.call(one, deadline=20)) for one in commands]
        epoch = await coordinator.own(SAMPLE_LANE, "owner", 60_000)
        left = 512
        while left:
            taken = await coordinator.next(SAMPLE_LANE, epoch, 64)
            left -= len(taken)
            ends = [coordinator.complete(SAMPLE_LANE, epoch, t.entry_id, h.event(t)) for t in reversed(taken)]
            await asyncio.gather(*ends)
        assert [(await call)[0].id for call in calls] == [one.id for one in commands]


async def test_a_result_that_nobody_took_can_still_be_fetched_whole(bus: Bus, coordinator: Bus, h: Any) -> None:
    epoch = await h.create(coordinator)
    async with bus.inbox() as inbox:
        for size in (3, 400_000):
            one, marker = h.command(), h.command()
            await inbox.submit(one)
            with pytest.raises(DeadlineExceeded):
                await inbox.wait(one.id, 0.01)
            await inbox.submit(marker)
            await done(coordinator, h, epoch, 2, bytes(size))
            await inbox.wait(marker.id, 5)
            await inbox.drained()
            assert len((await inbox.wait(one.id, 5))[1]) == size


async def test_a_command_accepted_while_its_state_is_asked_is_not_called_unknown(
    bus: Bus, coordinator: Bus, h: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = await h.create(coordinator)
    real, asked, accepted = bus.session.scripts, asyncio.Event(), asyncio.Event()

    async def late(runs: Any, *args: Any, **options: Any) -> Any:
        if runs and runs[0][0] == "submit":
            await asked.wait()
        replies = await real(runs, *args, **options)
        if runs and runs[0][0] == "attach":
            asked.set()
            await accepted.wait()
        return replies

    monkeypatch.setattr(bus.session, "scripts", late)
    inbox, one = bus.inbox(), h.command()
    submitting = asyncio.create_task(inbox.submit(one, b"x"))  # Its reader asks when it connects, before the submit.
    await submitting
    waiting = asyncio.create_task(inbox.wait(one.id, 5))
    await asyncio.sleep(0)
    accepted.set()
    await done(coordinator, h, epoch)
    assert (await waiting)[1] == b"x"
    await inbox.close()


async def test_a_refused_change_leaves_the_result_of_the_first_to_be_had(bus: Bus, h: Any) -> None:
    epoch = await h.create(bus)
    async with bus.inbox(keep_seconds=60) as inbox:
        one = h.command()
        await inbox.submit(one, b"first")
        await done(bus, h, epoch)
        assert (await inbox.wait(one.id, 5))[1] == b"first"
        with pytest.raises(CommandConflict):
            await inbox.submit(one, b"changed")
        assert (await inbox.wait(one.id, 5))[1] == b"first"


async def test_parts_come_in_order_before_the_result_and_another_reader_gets_the_result_alone(
    bus: Bus, coordinator: Bus, h: Any
) -> None:
    epoch = await coordinator.own(SAMPLE_LANE, "owner", 60_000)
    parts = [Part(0, at, [7 + at], [-0.5], f"t{at}") for at in range(3)]
    command = h.command(SAMPLE_LANE, Kind.SAMPLE)
    async with bus.inbox() as inbox, coordinator.inbox() as other:
        seen = []
        stream = inbox.stream(command)
        first = asyncio.create_task(anext(stream))
        await coordinator.bell("0", 5000)
        taken = await coordinator.next(SAMPLE_LANE, epoch)
        assert taken[0].reply_to == inbox.name
        for part in parts:
            await coordinator.put_parts(inbox.name, command.id, [part])
        seen.append(await first)
        waiting = asyncio.create_task(other.wait(command.id, 5))
        await coordinator.complete(SAMPLE_LANE, epoch, taken[0].entry_id, h.event(taken[0]), b"whole")
        seen += [item async for item in stream]
        assert [part for item in seen[:-1] for part in item] == parts
        assert seen[-1][1] == (await waiting)[1] == b"whole"


async def test_an_unreadable_entry_fails_its_own_waiter_and_the_others_go_on(bus: Bus, h: Any) -> None:
    epoch = await h.create(bus)
    async with bus.inbox() as inbox:
        bad, good = h.command(), h.command()
        waiting = [asyncio.create_task(inbox.call(one, deadline=5)) for one in (bad, good)]
        for one in (bad, good):
            await bus.submit(one)  # Both are there, whoever was first.
        key = bus.session.keys.inbox(inbox.name)
        for fields in (("x", b"\xff"), ("id", bad.id, "n", "x", "seq", "0", "header", b"\xc1", "body", b"")):
            await bus.session.call(("XADD", key, "*", *fields))
        with pytest.raises(ProtocolError):
            await waiting[0]
        await done(bus, h, epoch, 2)
        assert (await waiting[1])[0].ok


async def test_where_a_command_stands_is_told(bus: Bus, h: Any) -> None:
    epoch = await h.create(bus)
    one = h.command()
    assert await bus.stands(one.id) is None
    await bus.submit(one)
    assert await bus.stands(one.id) == ("m", "queued")
    await done(bus, h, epoch)
    assert await bus.stands(one.id) == ("m", "done")

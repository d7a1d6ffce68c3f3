"""Submitting: once, in order, or refused with a type that says why."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import pytest

from tinsmith.bus.bus import Bus
from tinsmith.bus.connection import open_bus
from tinsmith.bus.protocol.envelope import SAMPLE_LANE, Kind
from tinsmith.bus.protocol.errors import (
    Busy,
    CommandConflict,
    InvalidInput,
    ModelExists,
    ProtocolError,
    SeqConflict,
    UnknownModel,
)


async def keys_of(bus: Bus) -> dict[bytes, Any]:
    """Every key of the bus and its whole content."""
    ((_, keys),) = await bus.session.call(("SCAN", 0, "MATCH", bus.session.keys.pattern, "COUNT", 10**6))
    dumps = await bus.session.call(*(("DUMP", key) for key in keys))
    return dict(zip(keys, dumps, strict=True))


async def test_a_hundred_duplicate_submits_from_two_clients_make_one_entry(bus: Bus, coordinator: Bus, h: Any) -> None:
    epoch = await h.create(coordinator)
    one = h.command(seq=1)
    async with bus.inbox() as left, coordinator.inbox() as right:
        done = await asyncio.gather(*((left if i % 2 else right).submit(one, b"body") for i in range(100)))
        assert {s.seq for s in done} == {1}
        assert sum(not s.duplicate for s in done) == 1
        (taken,) = await coordinator.next("m", epoch, 100)
        assert await coordinator.backlog("m") == 1
        await coordinator.complete("m", epoch, taken.entry_id, h.event(taken, metrics={"loss": 0.1 + 0.2}), b"result")
        results = await asyncio.gather(*((left if i % 2 else right).wait(one.id, 5) for i in range(100)))
        assert all(body == b"result" and e == results[0][0] for e, body in results)
        late = await left.submit(one, b"body")
        assert late.duplicate
        assert late.event == results[0][0]
        assert (await left.wait(one.id, 5))[0] == results[0][0]


async def test_early_commands_are_parked_and_appended_in_order(bus: Bus, h: Any) -> None:
    epoch = await h.create(bus)
    early = {seq: h.command(seq=seq) for seq in (4, 2, 3)}
    for seq, one in early.items():
        submitted = await bus.submit(one, b"%d" % seq)
        assert (submitted.state, submitted.seq) == ("parked", seq)
    assert await bus.next("m", epoch, 10) == []
    assert (await bus.submit(early[3], b"3")).state == "parked"
    await bus.submit(h.command(seq=1), b"1")
    taken = await bus.next("m", epoch, 10)
    assert [(t.command.seq, t.body) for t in taken] == [(n, b"%d" % n) for n in (1, 2, 3, 4)]
    assert (await bus.submit(h.command())).seq == 5


async def test_each_conflict_has_its_own_type(bus: Bus, h: Any) -> None:
    with pytest.raises(UnknownModel):
        await bus.submit(h.command())
    await h.create(bus)
    with pytest.raises(ModelExists):
        await bus.submit(h.command(kind=Kind.CREATE_MODEL, seq=0))
    one = h.command(seq=1, args={"loss": "ppo"})
    await bus.submit(one, b"x")
    with pytest.raises(CommandConflict):
        await bus.submit(one, b"y")
    with pytest.raises(CommandConflict):
        await bus.submit(one.model_copy(update={"args": {"loss": "dro"}}), b"x")
    assert (await bus.submit(one.model_copy(update={"submitted": 0.0}), b"x")).duplicate
    with pytest.raises(SeqConflict):
        await bus.submit(h.command(seq=1))
    await bus.submit(h.command(seq=3))
    with pytest.raises(SeqConflict):
        await bus.submit(h.command(seq=3))
    with pytest.raises(SeqConflict):
        await bus.submit(h.command(SAMPLE_LANE, Kind.SAMPLE, seq=0))
    with pytest.raises(InvalidInput):
        await bus.submit(h.command(), reply_to="not a name")
    with pytest.raises(InvalidInput):
        await bus.submit(h.command(args={"x": object()}))


async def test_a_full_backlog_is_busy_but_a_gap_can_always_be_closed(url: str, bus: Bus, h: Any) -> None:
    epoch = await h.create(bus)
    async with await open_bus(url, bus.session.keys.bus, backlog_cap=3) as small:
        for seq in (2, 3, 4):
            await small.submit(h.command(seq=seq))
        refused = h.command(seq=5)
        with pytest.raises(Busy):
            await small.submit(refused)
        await small.submit(h.command(seq=1))
        with pytest.raises(Busy):
            await small.submit(refused)
        for taken in await bus.next("m", epoch, 4):
            await bus.complete("m", epoch, taken.entry_id, h.event(taken))
        assert (await small.submit(refused)).seq == 5


async def test_the_sampling_lane_is_always_there(bus: Bus, h: Any) -> None:
    await bus.submit(h.command(SAMPLE_LANE, Kind.SAMPLE), b"a")
    await bus.submit(h.command(SAMPLE_LANE, Kind.SAMPLE), b"b")
    epoch = await bus.own(SAMPLE_LANE, "owner", 60_000)
    first, second = await bus.next(SAMPLE_LANE, epoch, 10)
    assert [first.body, second.body] == [b"a", b"b"]
    await bus.complete(SAMPLE_LANE, epoch, second.entry_id, h.event(second))
    await bus.complete(SAMPLE_LANE, epoch, first.entry_id, h.event(first))
    assert await bus.models_with_backlog() == []


async def test_large_bodies_travel_as_blobs_and_go_with_their_entry(bus: Bus, h: Any) -> None:
    epoch = await h.create(bus)
    body = bytes(range(256)) * 40_000
    one = h.command(seq=1)
    await bus.submit(one, body)
    await bus.submit(one, body)
    (taken,) = await bus.next("m", epoch, 1)
    assert taken.body == body
    async with bus.inbox() as inbox:
        waiter = asyncio.create_task(inbox.wait(one.id, 5))
        await asyncio.sleep(0)
        await bus.complete("m", epoch, taken.entry_id, h.event(taken), body[::-1])
        done, result = await waiter
        await inbox.drained()
    assert done.body_bytes == len(body)
    assert result == body[::-1]
    assert not [key for key in await keys_of(bus) if b"}:b:" in key]
    kept = await bus.result(one.id)
    assert kept is not None
    assert kept == (done, b"")


@pytest.mark.parametrize("broken", ["commands", "meta", "parked", "events", "record", "models", "bell", "inbox"])
async def test_a_key_of_the_wrong_type_is_refused_without_a_partial_write(bus: Bus, h: Any, broken: str) -> None:
    await h.create(bus)
    one = h.command(seq=1)
    name = getattr(bus.session.keys, broken)
    key = name if isinstance(name, str) else name({"record": one.id, "inbox": "reader"}.get(broken, "m"))
    await bus.session.call(("DEL", key), ("SET", key, "something else"))
    before = await keys_of(bus)
    with pytest.raises(ProtocolError, match="nothing was written"):
        await bus.submit(one, b"body", reply_to="reader")
    assert await keys_of(bus) == before


async def test_scripts_are_loaded_again_after_a_flush(bus: Bus, h: Any) -> None:
    epoch = await h.create(bus)
    await bus.session.call(("SCRIPT", "FLUSH"))
    await bus.submit(h.command(seq=1))
    await bus.session.call(("SCRIPT", "FLUSH"))
    assert len(await bus.next("m", epoch, 5)) == 1
    await bus.session.call(("SCRIPT", "FLUSH"))
    await bus.renew(["m"], "owner", {"m": epoch}, 1000)


async def test_a_plain_xadd_at_the_door_is_admitted_and_answered(bus: Bus, coordinator: Bus, h: Any) -> None:
    epoch = await h.create(coordinator)
    keys = bus.session.keys
    good = {"v": 1, "id": "g1", "model": "m", "kind": "forward", "seq": -1, "args": {"loss": "ppo"}}
    for header in (msgpack.packb(good), msgpack.packb({**good, "id": "b1", "model": "absent"}), b"junk"):
        await bus.session.call(("XADD", keys.door, "*", "header", header, "body", b"frame", "reply_to", "mine"))
    names, _ = await coordinator.bell("$", 1000)
    assert names == ["m"]
    (taken,) = await coordinator.next("m", epoch, 5)
    assert (taken.command.id, taken.body, taken.reply_to) == ("g1", b"frame", "mine")
    await coordinator.complete("m", epoch, taken.entry_id, h.event(taken), b"out")
    (entries, door, dead) = await bus.session.call(
        ("XRANGE", keys.inbox("mine"), "-", "+"), ("XLEN", keys.door), ("XLEN", keys.dead)
    )
    refused, answered = (dict(zip(e[1][::2], e[1][1::2], strict=True)) for e in entries)
    assert (answered[b"id"], answered[b"body"], answered[b"n"]) == (b"g1", b"out", b"2")
    error = msgpack.unpackb(refused[b"header"])["error"]
    assert (refused[b"id"], error["code"]) == (b"b1", "unknown_model")
    assert (door, dead) == (0, 2)

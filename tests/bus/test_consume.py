"""Owning, taking and completing: one owner, in order, all or nothing, and nothing by an old epoch."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tinsmith.bus.bus import Bus
from tinsmith.bus.protocol.envelope import Kind
from tinsmith.bus.protocol.errors import Fenced, LeaseHeld, ProtocolError, UnknownModel


async def test_a_lease_is_held_until_it_ends_and_taking_over_fences_the_old_epoch(bus: Bus, h: Any) -> None:
    old = await h.create(bus)
    await bus.submit(h.command(seq=1))
    (taken,) = await bus.next("m", old, 1)
    with pytest.raises(LeaseHeld):
        await bus.own("m", "other", 1000)
    await bus.renew(["m"], "owner", {"m": old}, 1)
    while True:
        try:
            new = await bus.own("m", "other", 60_000)
            break
        except LeaseHeld:
            continue
    assert new > old
    for attempt in (
        bus.complete("m", old, taken.entry_id, h.event(taken)),
        bus.give_up("m", old, taken.entry_id, h.event(taken)),
        bus.next("m", old, 1),
        bus.renew(["m"], "owner", {"m": old}, 1000),
        bus.release("m", "owner", old),
        bus.trim("m", old, 0),
        bus.remove_model("m", old),
    ):
        with pytest.raises(Fenced):
            await attempt
    assert await bus.result(taken.command.id) is None
    (again,) = await bus.next("m", new, 1)
    assert (again.command, again.attempts) == (taken.command, 2)
    await bus.complete("m", new, again.entry_id, h.event(again))


async def test_one_fenced_model_does_not_keep_the_others_from_renewal(bus: Bus, h: Any) -> None:
    epochs = {name: await h.create(bus, name) for name in ("a", "b", "c")}
    before = int((await bus.meta("c"))["lease"])
    with pytest.raises(Fenced) as caught:
        await bus.renew(list(epochs), "owner", {**epochs, "b": epochs["b"] - 1}, 600_000)
    assert caught.value.model == "b"
    assert int((await bus.meta("c"))["lease"]) > before + 500_000


async def test_a_released_model_can_be_taken_at_once(bus: Bus, h: Any) -> None:
    epoch = await h.create(bus)
    await bus.release("m", "owner", epoch)
    assert await bus.own("m", "other", 1000) > epoch
    with pytest.raises(UnknownModel):
        await bus.own("absent", "other", 1000)


async def test_a_crash_between_next_and_complete_replays_in_order(bus: Bus, coordinator: Bus, h: Any) -> None:
    epoch = await h.create(coordinator)
    for seq in range(1, 6):
        await bus.submit(h.command(seq=seq), b"%d" % seq)
    first, *_ = await coordinator.next("m", epoch, 3)
    await coordinator.complete("m", epoch, first.entry_id, h.event(first))
    await coordinator.renew(["m"], "owner", [epoch], 1)
    await coordinator.close()
    while True:
        try:
            epoch = await bus.own("m", "heir", 60_000)
            break
        except LeaseHeld:
            continue
    again = await bus.next("m", epoch, 10, replay=True)
    assert [(t.command.seq, t.attempts) for t in again] == [(2, 2), (3, 2), (4, 1), (5, 1)]
    assert [t.body for t in again] == [b"2", b"3", b"4", b"5"]
    assert await bus.next("m", epoch, 10) == []
    assert len(await bus.next("m", epoch, 10, replay=True)) == 4


async def test_complete_is_all_or_nothing_for_a_reader(bus: Bus, coordinator: Bus, h: Any) -> None:
    epoch = await h.create(coordinator)
    keys = bus.session.keys
    one = h.command(seq=1)
    await bus.submit(one, reply_to="reader")
    seen = set()

    async def snapshot() -> tuple[Any, ...]:
        batch = [
            ("MULTI",),
            ("HGET", keys.record(one.id), "state"),
            ("HMGET", keys.meta("m"), "applied", "backlog", "n"),
            ("XLEN", keys.events("m")),
            ("XLEN", keys.inbox("reader")),
            ("XPENDING", keys.commands("m"), "tinsmith"),
            ("EXEC",),
        ]
        state, meta, events, inbox, pending = (await bus.session.call(*batch))[-1]
        return state, tuple(meta), events, inbox, pending[0]

    (taken,) = await coordinator.next("m", epoch, 1)
    ending = asyncio.create_task(coordinator.complete("m", epoch, taken.entry_id, h.event(taken), b"x"))
    while not ending.done():
        seen.add(await snapshot())
    seen.add(await snapshot())
    before, after = (b"queued", (b"0", b"1", b"1"), 1, 0, 1), (b"done", (b"1", b"0", b"2"), 2, 1, 0)
    assert after in seen
    assert seen <= {before, after}


async def test_completing_twice_is_once_and_out_of_order_is_refused(bus: Bus, h: Any) -> None:
    epoch = await h.create(bus)
    for seq in (1, 2):
        await bus.submit(h.command(seq=seq))
    first, second = await bus.next("m", epoch, 2)
    with pytest.raises(ProtocolError, match="not the next"):
        await bus.complete("m", epoch, second.entry_id, h.event(second))
    n = await bus.complete("m", epoch, first.entry_id, h.event(first))
    assert await bus.complete("m", epoch, first.entry_id, h.event(first)) == n
    with pytest.raises(ProtocolError, match="another entry"):
        await bus.complete("m", epoch, first.entry_id, h.event(second))
    with pytest.raises(ProtocolError, match="no record"):
        await bus.complete("m", epoch, first.entry_id, h.event(second, id="absent"))
    assert await bus.backlog("m") == 1


async def test_the_redo_log_holds_what_was_kept_since_the_snapshot(bus: Bus, h: Any) -> None:
    epoch = await h.create(bus)
    big = bytes(300_000)
    for seq in range(1, 8):
        await bus.submit(h.command(seq=seq), big if seq == 3 else b"%d" % seq)
    for taken in await bus.next("m", epoch, 6):
        await bus.complete("m", epoch, taken.entry_id, h.event(taken), keep=taken.command.seq % 2 == 1)
    assert [t.command.seq async for t in bus.redo_log("m")] == [0, 1, 3, 5]
    assert [t.body async for t in bus.redo_log("m")][1:] == [b"1", big, b"5"]
    with pytest.raises(ProtocolError, match="only 6"):
        await bus.trim("m", epoch, 7)
    assert await bus.trim("m", epoch, 3) == 3
    assert [t.command.seq async for t in bus.redo_log("m")] == [5]
    assert (await bus.meta("m"))["snapshot"] == "3"
    assert await bus.trim("m", epoch, 1) == 0
    assert (await bus.meta("m"))["snapshot"] == "3"
    (blobs,) = await bus.session.call(("KEYS", bus.session.keys.blob("*")))
    assert blobs == []
    assert [t.command.seq for t in await bus.next("m", epoch, 5)] == [7]


async def test_a_command_given_up_is_recorded_and_the_model_goes_on(bus: Bus, h: Any) -> None:
    epoch = await h.create(bus)
    one = h.command(seq=1)
    await bus.submit(one)
    await bus.submit(h.command(seq=2))
    first, second = await bus.next("m", epoch, 2)
    await bus.give_up("m", epoch, first.entry_id, h.event(first, ok=False, error={"code": "command_failed"}))
    await bus.complete("m", epoch, second.entry_id, h.event(second))
    (dead,) = await bus.session.call(("XRANGE", bus.session.keys.dead, "-", "+"))
    fields = dict(zip(dead[0][1][::2], dead[0][1][1::2], strict=True))
    assert (fields[b"id"], fields[b"seq"]) == (one.id.encode(), b"1")
    assert fields[b"command"]
    result = await bus.result(one.id)
    assert result is not None
    assert not result[0].ok


async def test_an_unloaded_model_answers_what_waits_and_can_be_created_again(bus: Bus, h: Any) -> None:
    epoch = await h.create(bus)
    unload, behind, parked = h.command(kind=Kind.UNLOAD, seq=1), h.command(seq=2), h.command(seq=9)
    async with bus.inbox() as inbox:
        for one in (unload, behind, parked):
            await inbox.submit(one, bytes(300_000))
        (taken,) = await bus.next("m", epoch, 1)
        await bus.complete("m", epoch, taken.entry_id, h.event(taken), keep=True)
        with pytest.raises(UnknownModel):
            await bus.submit(h.command())
        await bus.remove_model("m", epoch)
        assert (await inbox.wait(unload.id, 5))[0].ok
        for one in (behind, parked):
            done, _ = await inbox.wait(one.id, 5)
            assert done.error is not None
            assert done.error["code"] == "unknown_model"
    assert await bus.all_models() == []
    with pytest.raises(UnknownModel):
        await bus.submit(h.command())
    (blobs,) = await bus.session.call(("KEYS", bus.session.keys.blob("*")))
    assert blobs == []
    assert await h.create(bus) > epoch
    assert (await bus.submit(h.command())).seq == 1


async def test_a_failed_creation_leaves_no_model(bus: Bus, h: Any) -> None:
    await bus.submit(h.command(kind=Kind.CREATE_MODEL, seq=0))
    epoch = await bus.own("m", "owner", 60_000)
    (taken,) = await bus.next("m", epoch, 1)
    await bus.complete("m", epoch, taken.entry_id, h.event(taken, ok=False, error={"code": "invalid_input"}))
    with pytest.raises(UnknownModel):
        await bus.submit(h.command())
    await bus.remove_model("m", epoch)
    await h.create(bus)


async def test_the_doorbell_names_the_models(bus: Bus, coordinator: Bus, h: Any) -> None:
    await h.create(bus, "a")
    _, last = await coordinator.bell("0", 1)
    waiting = asyncio.create_task(coordinator.bell(last, 5000))
    await h.create(bus, "b")
    names, last = await waiting
    assert names == ["b"]
    assert await coordinator.bell(last, 1) == ([], last)
    await bus.submit(h.command("a", seq=1))
    assert await coordinator.models_with_backlog() == ["a"]
    assert await coordinator.all_models() == ["a", "b"]


async def test_takers_at_the_same_time_share_the_commands(bus: Bus, h: Any) -> None:
    epoch = await h.create(bus)
    for _ in range(20):
        await bus.submit(h.command())
    taken = await asyncio.gather(*(bus.next("m", epoch, 3) for _ in range(8)))
    assert [t.command.seq for some in taken for t in some] == list(range(1, 21))

"""Faults of server and network: nothing acknowledged is lost, nothing runs twice, whoever waits is told."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tinsmith.bus.bus import Bus
from tinsmith.bus.connection import open_bus
from tinsmith.bus.protocol.errors import BusLost, BusUnreachable, Busy
from tinsmith.bus.redis.embedded import EmbeddedServer
from tinsmith.bus.redis.scripts import SCRIPTS


def kill(server: EmbeddedServer) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    server.stop()


@pytest.mark.parametrize("opens_again", [False, True])
async def test_a_flushed_server_is_told_to_every_waiter(
    own_server: EmbeddedServer, tmp_path: Path, h: Any, opens_again: bool
) -> None:
    url = own_server.start(tmp_path / "s")
    async with await open_bus(url) as bus, bus.inbox() as inbox:
        epoch = await h.create(bus)
        commands = [h.command() for _ in range(3)]
        for one in commands:
            await inbox.submit(one)
        began = time.monotonic()
        await bus.session.call(("FLUSHALL",))
        if opens_again:
            await (await open_bus(url)).close()
        results = await asyncio.gather(*(inbox.wait(one.id, 10) for one in commands), return_exceptions=True)
        assert all(isinstance(result, BusLost) for result in results)
        assert time.monotonic() - began < 5
        with pytest.raises(BusLost):
            await bus.submit(h.command())
        with pytest.raises(BusLost):
            await bus.own("m", "owner", 1000)
        with pytest.raises(BusLost):
            await bus.next("m", epoch, 1)
        with pytest.raises(BusLost):
            await inbox.wait("any", 5)
        with pytest.raises(BusLost):
            async for _ in bus.events(None):
                pass


async def test_a_server_that_comes_back_empty_is_told_to_every_waiter(
    own_server: EmbeddedServer, tmp_path: Path, h: Any
) -> None:
    url = own_server.start(tmp_path / "s")
    async with await open_bus(url) as bus, bus.inbox() as inbox:
        await h.create(bus)
        one = h.command()
        await inbox.submit(one)
        waiting = asyncio.create_task(inbox.wait(one.id, 10))
        kill(own_server)
        shutil.rmtree(tmp_path / "s" / "appendonlydir")
        assert await asyncio.to_thread(own_server.start, tmp_path / "s") == url
        began = time.monotonic()
        with pytest.raises(BusLost):
            await waiting
        assert time.monotonic() - began < 5


async def test_a_killed_server_loses_no_acknowledged_submit_and_waiters_resolve(
    own_server: EmbeddedServer, tmp_path: Path, h: Any
) -> None:
    url = own_server.start(tmp_path / "s")
    async with await open_bus(url) as bus, await open_bus(url) as coordinator, bus.inbox() as inbox:
        epoch = await h.create(coordinator)
        acknowledged: list[Any] = []
        effects: list[str] = []
        stop, progress = asyncio.Event(), asyncio.Event()

        async def submit() -> None:
            while not stop.is_set():
                one = h.command()
                await inbox.submit(one)
                acknowledged.append(one)
                progress.set()

        async def work() -> None:
            while not stop.is_set() or await coordinator.backlog("m"):
                for taken in await coordinator.next("m", epoch, 4):
                    if taken.command.id not in effects:
                        effects.append(taken.command.id)
                    await coordinator.complete("m", epoch, taken.entry_id, h.event(taken))

        tasks = [asyncio.create_task(submit()), asyncio.create_task(work())]
        for _ in range(3):
            target = len(acknowledged) + 20
            while len(acknowledged) < target:
                progress.clear()
                await progress.wait()
            await asyncio.to_thread(kill, own_server)
            await asyncio.to_thread(own_server.start, tmp_path / "s")
            back = time.monotonic()
            newest = acknowledged[-1]
            assert (await inbox.wait(newest.id, 10))[0].ok
            assert time.monotonic() - back < 2
        stop.set()
        await asyncio.gather(*tasks)
        results = [await inbox.wait(one.id, 10) for one in acknowledged]
        assert [result.seq for result, _ in results] == list(range(1, len(acknowledged) + 1))
        assert effects == [one.id for one in acknowledged]


async def test_a_server_stopped_for_a_while_is_no_error(own_server: EmbeddedServer, tmp_path: Path, h: Any) -> None:
    url = own_server.start(tmp_path / "s")
    async with await open_bus(url) as bus, bus.inbox() as inbox:
        epoch = await h.create(bus)
        assert own_server.pid is not None
        os.kill(own_server.pid, signal.SIGSTOP)
        calls = [asyncio.create_task(inbox.submit(h.command())) for _ in range(5)]
        with pytest.raises(BusUnreachable):
            await bus.submit(h.command(), deadline=0.2)
        asyncio.get_running_loop().call_later(2.5, os.kill, own_server.pid, signal.SIGCONT)
        with pytest.raises(BusUnreachable):
            await bus.session.call(("PING",), deadline=2.2)
        assert sorted([(await call).seq for call in calls])[:5] == sorted({(await call).seq for call in calls})
        assert len(await bus.next("m", epoch, 10)) >= 5


async def test_memory_full_refuses_submits_but_completes_go_on(
    own_server: EmbeddedServer, tmp_path: Path, h: Any
) -> None:
    url = own_server.start(tmp_path / "s")
    async with await open_bus(url) as bus, bus.inbox() as inbox:
        epoch = await h.create(bus)
        held = [h.command() for _ in range(6)]
        for one in held:
            await inbox.submit(one, bytes(200_000))
        used = (await bus.info()).used_bytes
        await bus.session.call(("CONFIG", "SET", "maxmemory", used - 100_000))
        refused = h.command()
        for body in (b"", bytes(400_000)):
            with pytest.raises(Busy):
                await bus.submit(refused, body)
        await bus.session.call(("CONFIG", "SET", "maxmemory", used // 2))
        assert (await bus.submit(held[0], bytes(200_000), reply_to="late")).duplicate
        await bus.renew(["m"], "owner", {"m": epoch}, 60_000)
        taken = await bus.next("m", epoch, 10)
        assert len(taken) == 6
        for item, one in zip(taken, held, strict=True):
            await bus.complete("m", epoch, item.entry_id, h.event(item), bytes(300_000))
            assert len((await inbox.wait(one.id, 5))[1]) == 300_000
        epoch = await bus.own("m", "owner", 60_000)
        await bus.session.call(("CONFIG", "SET", "maxmemory", 0))
        assert (await bus.submit(refused)).seq == 7


@pytest.mark.parametrize("script", ["submit", "own", "next", "complete", "renew", "trim", "attach", "drain", "free"])
async def test_a_lost_reply_leaves_the_same_state(bus: Bus, proxy: Any, h: Any, script: str) -> None:
    async with await open_bus(f"unix://{proxy.path}", bus.session.keys.bus) as remote:
        proxy.skip, proxy.lose = SCRIPTS[script].sha.encode(), 2
        epoch = await h.create(remote)
        one, two = h.command(seq=1), h.command(seq=2)
        for command in (one, two):
            await remote.submit(command)
        seqs = []
        for _ in range(2):
            (taken,) = await remote.next("m", epoch, 1)
            seqs.append(taken.command.seq)
            await remote.complete("m", epoch, taken.entry_id, h.event(taken), b"r", keep=True)
        await remote.renew(["m"], "owner", {"m": epoch}, 1000)
        assert seqs == [1, 2]
        result = await remote.result(two.id)
        assert result is not None
        assert (result[0].n, result[1]) == (3, b"r")
        meta = await remote.meta("m")
        assert [meta[name] for name in ("seq", "applied", "n", "backlog")] == ["2", "2", "3", "0"]
        await remote.trim("m", epoch, 1)
        assert [t.command.seq async for t in remote.redo_log("m")] == [2]
        await remote.remove_model("m", epoch)
        assert await remote.all_models() == []
        assert proxy.lost >= 1


async def test_a_cancelled_await_never_shifts_replies(bus: Bus) -> None:
    session = bus.session
    for rounds in range(30):
        calls = [asyncio.create_task(session.call(("ECHO", f"{rounds}-{at}"))) for at in range(20)]
        for at, call in enumerate(calls):
            if at % 2:
                for _ in range(at % 5):
                    await asyncio.sleep(0)
                call.cancel()
        for at, call in enumerate(calls):
            if at % 2 == 0:
                assert await call == [f"{rounds}-{at}".encode()]
    assert session.wire.connects == 1


async def test_nobody_there_is_a_typed_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(BusUnreachable, match="Remedy"):
        await open_bus(f"unix://{tmp_path}/absent.sock", connect_seconds=0.1)
    with pytest.raises(BusUnreachable) as caught:
        await open_bus("redis://user:secret@127.0.0.1:1/0", connect_seconds=0.1)
    assert "secret" not in str(caught.value)

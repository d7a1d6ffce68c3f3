"""A real server for all tests of the bus, a bus of its own for each, and a proxy that loses what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tinsmith.bus.bus import Bus
from tinsmith.bus.connection import open_bus
from tinsmith.bus.ownership import Taken
from tinsmith.bus.protocol.envelope import Command, Event, Kind, new_id
from tinsmith.bus.redis.embedded import EmbeddedServer


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedServer()
    yield server.start(tmp_path_factory.mktemp("bus"))
    server.stop()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server that the test may harm; not started yet."""
    server = EmbeddedServer()
    yield server
    server.stop()


@pytest.fixture
async def bus(url: str) -> AsyncIterator[Bus]:
    """A client of a bus that no other test uses."""
    async with await open_bus(url, f"t-{new_id()}") as opened:
        yield opened


@pytest.fixture
async def coordinator(url: str, bus: Bus) -> AsyncIterator[Bus]:
    """A second client of the same bus, for the other side."""
    async with await open_bus(url, bus.session.keys.bus) as opened:
        yield opened


def command(model: str = "m", kind: Kind = Kind.FORWARD_BACKWARD, seq: int = -1, **fields: Any) -> Command:
    return Command(id=fields.pop("id", None) or new_id(), model=model, kind=kind, seq=seq, **fields)


def event(taken: Taken, **fields: Any) -> Event:
    about = taken.command
    head = {"id": about.id, "model": about.model, "kind": about.kind, "seq": about.seq, "ok": True}
    return Event.model_validate({**head, **fields})


async def create(bus: Bus, model: str = "m", lease_ms: int = 60_000) -> int:
    """A model that exists, its creation completed; returns the epoch of its owner."""
    await bus.submit(command(model, Kind.CREATE_MODEL, 0))
    epoch = await bus.own(model, "owner", lease_ms)
    (taken,) = await bus.next(model, epoch, 1)
    await bus.complete(model, epoch, taken.entry_id, event(taken), keep=True)
    return epoch


@dataclass
class Helpers:
    """The functions above, for tests."""

    command = staticmethod(command)
    event = staticmethod(event)
    create = staticmethod(create)


@pytest.fixture
def h() -> Helpers:
    return Helpers()


@dataclass
class Proxy:
    """Stands between a client and the server's socket. `lose`: drop that many replies, each with its connection;
    `frozen`: nothing comes through any more on connections made so far."""

    target: str
    path: str
    lose: int = 0
    lost: int = 0
    skip: bytes = b""
    """Only replies to requests that contain this are lost."""
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    frozen: set[asyncio.StreamWriter] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_unix_server(self._accept, self.path, limit=2**24)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_unix_connection(self.target, limit=2**24)
        self.writers.append(writer)
        armed = [False]

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, up: bool) -> None:
            try:
                while data := await source.read(65536):
                    if writer in self.frozen:
                        continue
                    if up and self.lose and self.skip in data:
                        armed[0] = True
                    if not up and armed[0] and self.lose:
                        self.lose -= 1
                        self.lost += 1
                        break
                    sink.write(data)
                    await sink.drain()
            except (ConnectionError, OSError):
                pass
            finally:
                if writer not in self.frozen:
                    writer.close()
                    back_writer.close()

        pumps = [pump(reader, back_writer, True), pump(back_reader, writer, False)]
        for work in pumps:
            task = asyncio.ensure_future(work)
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def drop_all(self) -> None:
        """Cut every connection."""
        for writer in self.writers:
            if writer not in self.frozen:
                writer.transport.abort()
        self.writers.clear()

    def freeze_all(self) -> None:
        """Let every connection made so far go silent."""
        self.frozen.update(self.writers)
        self.writers.clear()


@pytest.fixture
async def proxy(url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Proxy]:
    made = Proxy(url.removeprefix("unix://"), str(tmp_path_factory.mktemp("p") / "p.sock"))
    server = await made.serve()
    yield made
    server.close()
    for task in list(made.tasks):
        task.cancel()

"""Wire: one connection that all callers share, safe to cancel at every await.

Redis answers in the order of the requests. A caller that is cancelled while it waits inside a client library leaves its
reply behind for the next caller. Here no caller ever awaits the connection: it leaves its commands in a queue and
awaits a future; one task writes, one reads, and a reply whose future was dropped is thrown away.

Invariants: the futures in flight stand in the order of the bytes on the connection; when the connection fails, each
of them fails, once; nothing is sent twice by the wire (whether a repetition is safe only the caller knows).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from redis.asyncio.connection import Connection, UnixDomainSocketConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from tinsmith.bus.protocol.errors import TinsmithError

Word: TypeAlias = "str | bytes | int | float"
CONNECT_SECONDS = 3.0


@dataclass
class _Batch:
    """Commands that were sent together, and where their replies go."""

    packed: list[bytes]
    count: int
    future: asyncio.Future[list[Any]]
    replies: list[Any] = field(default_factory=list)
    sent: float = 0.0

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # A dropped waiter is no reason for a warning.


class Wire:
    """A connection to `url` that comes back by itself; `greet` runs on each new connection before anything else."""

    def __init__(self, url: str, greet: Callable[[Any], Awaitable[None]]) -> None:
        options = dict(parse_url(url))
        kind = options.pop("connection_class", Connection)
        options.update(
            retry=Retry(NoBackoff(), 0), socket_timeout=None, socket_connect_timeout=CONNECT_SECONDS, protocol=2
        )
        if kind is not UnixDomainSocketConnection:
            options["socket_keepalive"] = True
        self._make: Callable[[], Any] = lambda: kind(**options)
        self._packer = self._make()
        self._greet = greet
        self._outbox: deque[_Batch] = deque()
        self._inflight: deque[_Batch] = deque()
        self._wake = asyncio.Event()
        self._connection: Any = None
        self._closed = False
        self._task: asyncio.Task[None] | None = None
        self.connects = 0
        """How many connections were made so far; a reader that sees it change may have missed something."""

    async def send(self, commands: Sequence[Sequence[Word]]) -> list[Any]:
        """The replies to a batch of commands, each bytes, int, None, list, or a ResponseError (not raised).

        Raises redis ConnectionError or OSError when the connection fails before all replies are there (the commands
        may or may not have run), and what `greet` raised.
        """
        if self._closed:
            raise RedisConnectionError("the wire is closed")
        packed = [part for command in commands for part in self._packer.pack_command(*command)]
        batch = _Batch(packed, len(commands), asyncio.get_running_loop().create_future())
        self._outbox.append(batch)
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="tinsmith-wire")
        return await batch.future

    def break_off(self, older_than: float = 0.0) -> None:
        """Drop the connection if its oldest request has waited longer than `older_than` seconds."""
        now = asyncio.get_running_loop().time()
        if self._connection is not None and self._inflight and now - self._inflight[0].sent >= older_than:
            transport = self._connection._writer.transport if self._connection._writer else None
            if transport is not None:
                transport.abort()

    async def close(self) -> None:
        """Close the connection; whoever waits gets a ConnectionError."""
        self._closed = True
        self._wake.set()
        if self._task is not None:
            # Our own task, which throws the connection away: nobody's reply can shift.
            self._task.cancel()
            await asyncio.wait([self._task])
        self._fail(RedisConnectionError("the wire was closed"))

    async def _run(self) -> None:
        while not self._closed:
            await self._wake.wait()
            self._wake.clear()
            if not self._outbox:
                continue
            try:
                connection = await self._connect()
            except (RedisError, OSError, TinsmithError) as error:
                self._fail(error)
                continue
            reader = asyncio.create_task(self._read(connection), name="tinsmith-wire-reader")
            reader.add_done_callback(lambda _: self._wake.set())
            self._wake.set()
            error_: BaseException = RedisConnectionError("the connection was lost")
            try:
                await self._write(connection, reader)
            except (RedisError, OSError) as error:
                error_ = error
            finally:
                reader.cancel()
                await asyncio.wait([reader])
                self._connection = None
                await connection.disconnect(nowait=True)
                # What was queued but not yet sent stays for the next connection.
                self._fail(error_, queued=False)
                if self._outbox:
                    self._wake.set()

    async def _connect(self) -> Any:
        connection = self._make()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await connection.connect()
                await self._greet(connection)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        self._connection = connection
        self.connects += 1
        return connection

    async def _write(self, connection: Any, reader: asyncio.Task[None]) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await self._wake.wait()
            self._wake.clear()
            if reader.done():
                reader.result()
            if self._outbox:
                parts: list[bytes] = []
                while self._outbox:
                    batch = self._outbox.popleft()
                    if batch.future.done():
                        continue
                    batch.sent = clock()
                    self._inflight.append(batch)
                    parts += batch.packed
                await connection.send_packed_command(parts, check_health=False)

    async def _read(self, connection: Any) -> None:
        while True:
            try:
                reply = await connection.read_response(disconnect_on_error=False)
            except ResponseError as error:
                reply = error
            if not self._inflight:
                raise RedisConnectionError("the server sent a reply that nobody asked for")
            batch = self._inflight[0]
            batch.replies.append(reply)
            if len(batch.replies) == batch.count:
                self._inflight.popleft()
                if not batch.future.done():
                    batch.future.set_result(batch.replies)

    def _fail(self, error: BaseException, queued: bool = True) -> None:
        for queue in (self._inflight, self._outbox) if queued else (self._inflight,):
            while queue:
                queue.popleft().fail(error)

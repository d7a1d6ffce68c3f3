"""Inbox: one reader a process that resolves the futures of all its commands.

Invariants: a result is never missed: on each new connection the state of every command that is waited for is read
before reading goes on; the body of a result goes from the bus only after its waiter has it; the reply stream holds
what was not read yet, nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from tinsmith.bus.ownership import fields_of
from tinsmith.bus.protocol.envelope import Command, Event, new_id
from tinsmith.bus.protocol.errors import (
    BusError,
    BusLost,
    BusUnreachable,
    CommandConflict,
    DeadlineExceeded,
    ProtocolError,
    TinsmithError,
    UnknownCommand,
)
from tinsmith.bus.protocol.headers import unpack_event
from tinsmith.bus.protocol.parts import Part, unpack_parts
from tinsmith.bus.redis.blobs import get_blob
from tinsmith.bus.redis.session import Session
from tinsmith.bus.redis.wire import Wire
from tinsmith.bus.submit import Submitted, Submitter, check_reader

BLOCK_MS = 1000
"""How long one read waits; also how soon lost data shows."""

Completion = tuple[Event, bytes]


class Inbox:
    """Waits for results. Use as an async context manager, or call `start` and `close`.

    keep_seconds: how long the bus keeps a body that was received here, for whoever asks again.
    """

    def __init__(
        self, session: Session, producer: Submitter, name: str | None = None, keep_seconds: float = 0.0
    ) -> None:
        self.name = check_reader(name) or new_id()
        self._keep_seconds = keep_seconds
        self._kept: set[asyncio.TimerHandle] = set()
        self._session = session
        self._producer = producer
        self._wire = session.new_wire()
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self._accepted: set[str] = set()
        self._parts: dict[str, asyncio.Queue[list[Part]]] = {}
        self._received: list[str] = []
        self._read_entries: list[bytes] = []
        self._cleaner: asyncio.Task[None] | None = None
        self._jobs: set[asyncio.Task[Any]] = set()
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> Inbox:
        """Begin to read; returns self."""
        if self._reader is None:
            self._reader = asyncio.create_task(self._read(), name="tinsmith-inbox")
        return self

    async def close(self) -> None:
        """Stop reading; whoever still waits gets BusUnreachable (results stay on the bus)."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
        for timer in self._kept:
            timer.cancel()
        for job in list(self._jobs):
            job.cancel()
        if self._jobs:
            await asyncio.wait(self._jobs)
        await self._session.close_wire(self._wire)
        self._fail_all(BusUnreachable("this inbox was closed", remedy="Ask for the result with the command id."))

    async def drained(self) -> None:
        """Return when what was delivered so far is cleaned up on the bus."""
        while self._jobs:
            await asyncio.wait(self._jobs)

    async def __aenter__(self) -> Inbox:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def submit(self, command: Command, body: bytes = b"", *, deadline: float | None = None) -> Submitted:
        """Submit a command whose result comes to this inbox; then `wait` for its id. Errors as Submitter.submit."""
        await self.start()
        self._expect(command.id)
        try:
            submitted = await self._producer.submit(command, body, reply_to=self.name, deadline=deadline)
        except CommandConflict:
            # The id is that of another command, for which somebody may wait with the same future: the bus knows of it.
            self._accepted.add(command.id)
            self._spawn(self._ask([command.id]))
            raise
        except TinsmithError as error:
            if not isinstance(error, BusUnreachable):
                self._waiting.pop(command.id, None)
            raise
        if command.id in self._waiting:  # Its result may have come before this answer.
            self._accepted.add(command.id)
        if submitted.state == "done":
            self._spawn(self._ask([command.id]))
        return submitted

    async def wait(self, command_id: str, deadline: float | None = None) -> Completion:
        """The event and body of a command, whoever submitted it. `deadline` in seconds; None waits for ever.

        An event with ok false is returned, not raised. Raises DeadlineExceeded (the command goes on, waiting again is
        fine), UnknownCommand, BusLost.
        """
        await self.start()
        future = self._waiting.get(command_id)
        if future is None:
            future = self._expect(command_id)
            self._accepted.add(command_id)
            self._spawn(self._ask([command_id]))
        return await self._receive(command_id, future, deadline)

    async def call(self, command: Command, body: bytes = b"", *, deadline: float | None = None) -> Completion:
        """Submit and wait."""
        future = self._expect(command.id)
        await self.submit(command, body)
        return await self._receive(command.id, future, deadline)

    async def stream(self, command: Command, body: bytes = b"") -> AsyncIterator[list[Part] | Completion]:
        """Submit a command that asks to be streamed; yields parts as `Bus.put_parts` sent them, and at the end the
        result. Errors as `call`; leaving early does not stop the command.
        """
        arrived = self._parts[command.id] = asyncio.Queue()
        try:
            call = asyncio.create_task(self.call(command, body))
            call.add_done_callback(lambda ended: arrived.put_nowait([]))
            while not call.done() or not arrived.empty():
                parts = await arrived.get()
                if parts:
                    yield parts
            yield await call
        finally:
            self._parts.pop(command.id, None)
            call.cancel()

    async def _receive(self, command_id: str, future: asyncio.Future[Completion], deadline: float | None) -> Completion:
        try:
            async with asyncio.timeout(deadline):
                # Others may wait for the same command: a waiter that gives up must not cancel theirs.
                result = await asyncio.shield(future)
        except TimeoutError:
            raise DeadlineExceeded(
                f"no result within {deadline:g} s", remedy="Wait again with the same command id.", command=command_id
            ) from None
        # Only now, in the hands of a waiter, may the bus forget the body.
        if self._keep_seconds:
            loop = asyncio.get_running_loop()
            timer: asyncio.TimerHandle = loop.call_later(self._keep_seconds, lambda: self._let_go(command_id, timer))
            self._kept.add(timer)
        else:
            self._let_go(command_id)
        return result

    def _let_go(self, command_id: str, timer: asyncio.TimerHandle | None = None) -> None:
        if timer is not None:
            self._kept.discard(timer)
        self._received.append(command_id)
        self._clean_soon()

    def _expect(self, command_id: str) -> asyncio.Future[Completion]:
        if self._session.lost is not None:
            raise self._session.lost
        future = self._waiting.get(command_id)
        if future is None:
            future = self._waiting[command_id] = asyncio.get_running_loop().create_future()
        return future

    async def _read(self) -> None:
        session, key = self._session, self._session.keys.inbox(self.name)
        last, connects = "0-0", self._wire.connects
        while True:
            try:
                command = ("XREAD", "COUNT", 256, "BLOCK", BLOCK_MS, "STREAMS", key, last)
                reply = await session.block(self._wire, BLOCK_MS, *command)
                if connects != self._wire.connects:
                    made = self._wire.connects
                    # On this wire, which has just answered; the session's may be half-open still.
                    await self._ask(list(self._waiting), self._wire)
                    connects = made
                if not reply:
                    await session.check_life()
                    continue
                entries = reply[0][1]
                last = entries[-1][0].decode()
                for entry in entries:
                    self._deliver(fields_of(entry))
                    self._read_entries.append(entry[0])
                self._clean_soon()
            except BusLost as error:
                self._fail_all(error)
                return
            except BusUnreachable:
                continue  # Waiters have deadlines of their own; the next connection asks for every one of them.

    def _deliver(self, fields: dict[str, bytes]) -> None:
        command_id = fields.get("id", b"").decode(errors="replace")
        try:
            self._take(command_id, fields)
        except (ProtocolError, KeyError, ValueError) as error:
            # Anybody can write into this stream: one bad entry must not end the reading of all others.
            self._reject(command_id, ProtocolError(f"an unreadable result: {error!r}", command=command_id))

    def _take(self, command_id: str, fields: dict[str, bytes]) -> None:
        if "parts" in fields:
            if (arrived := self._parts.get(command_id)) is not None:
                arrived.put_nowait(unpack_parts(fields["parts"]))
            return
        if command_id not in self._waiting:
            return
        if "body" not in fields:
            # Too large for the stream: fetched apart, so that it does not hold up the others.
            self._spawn(self._ask([command_id]))
            return
        event = unpack_event(fields["header"], int(fields["n"]), int(fields["seq"]))
        self._resolve(command_id, event, fields["body"])

    async def _ask(self, ids: list[str], wire: Wire | None = None) -> None:
        """Read the state of commands that are waited for, and resolve those that are done."""
        session = self._session
        # Fixed before the question: a submit that is on its way may be accepted after the bus has answered.
        accepted = self._accepted.intersection(ids)
        runs = [("attach", [session.keys.record(command_id)], [self.name]) for command_id in ids]
        try:
            replies = await session.scripts(runs, wire=wire) if runs else []
        except BusUnreachable as error:
            if wire is None:
                for command_id in ids:
                    self._reject(command_id, error)
            raise
        for command_id, reply in zip(ids, replies, strict=True):
            future = self._waiting.get(command_id)
            if future is None:
                continue
            if isinstance(reply, BusError):
                self._reject(command_id, reply.at(command=command_id))
            elif reply[0] == "DONE":
                try:
                    self._resolve(command_id, *await result_of(session, reply))
                except ProtocolError as error:
                    self._reject(command_id, error.at(command=command_id))
            elif reply[0] == "NONE" and command_id in accepted:
                self._reject(command_id, unknown_command(command_id))

    def _resolve(self, command_id: str, event: Event, body: bytes) -> None:
        future = self._waiting.pop(command_id, None)
        self._accepted.discard(command_id)
        if future is not None and not future.done():
            future.set_result((event, body))

    def _clean_soon(self) -> None:
        if self._cleaner is None or self._cleaner.done():
            self._cleaner = self._spawn(self._clean())

    async def _clean(self) -> None:
        """Take what was read from the reply stream, and from their records the bodies that waiters have."""
        session, keys = self._session, self._session.keys
        while self._received or self._read_entries:
            received, self._received = self._received, []
            entries, self._read_entries = self._read_entries, []
            if entries:
                await session.call(("XDEL", keys.inbox(self.name), *entries))
            await session.scripts([("drop", [keys.record(at)], [self.name, keys.blob_prefix]) for at in received])

    def _reject(self, command_id: str, error: BusError | UnknownCommand) -> None:
        future = self._waiting.pop(command_id, None)
        self._accepted.discard(command_id)
        if future is not None and not future.done():
            future.set_exception(error)
            future.exception()

    def _fail_all(self, error: BusError) -> None:
        for command_id in list(self._waiting):
            self._reject(command_id, error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        job = asyncio.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._ended)
        return job

    def _ended(self, job: asyncio.Task[Any]) -> None:
        self._jobs.discard(job)
        error = None if job.cancelled() else job.exception()
        if isinstance(error, BusLost):
            self._fail_all(error)
        elif error is not None and not isinstance(error, BusUnreachable):
            # Unreachable: waiters were told, and what was not cleaned goes by its TTL. Anything else is a defect.
            raise error


async def result_of(session: Session, reply: list[Any]) -> Completion:
    """The event and body that a DONE reply of attach tells; no body once it was dropped."""
    _, n, seq, header, size, body, blob, _dropped = reply
    event = unpack_event(header, n, seq)
    if blob:
        body = await get_blob(session, blob.decode(), size)
    return event, body


def unknown_command(command_id: str) -> UnknownCommand:
    """The error for an id of which the bus has no record."""
    return UnknownCommand(
        "the bus has no record of this command id",
        remedy="Results are kept for an hour; check the id.",
        command=command_id,
    )

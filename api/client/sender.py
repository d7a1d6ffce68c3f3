"""Puts one model's commands on the bus, one after the other, so that their order is that of the calls."""

from __future__ import annotations

import asyncio
from functools import partial

from tinsmith.api.client.pending import Completion
from tinsmith.bus.bus import Bus
from tinsmith.bus.inbox import Inbox
from tinsmith.bus.protocol.envelope import Command
from tinsmith.bus.protocol.errors import BusUnreachable, Busy, TinsmithError

RETRY_SECONDS = (0.02, 1.0)
"""First and longest pause before a refused or lost submit is sent again."""


class Sender:
    """A queue in this process, and a task that empties it."""

    def __init__(self, bus: Bus, inbox: Inbox, timeout: float) -> None:
        self._bus = bus
        self._inbox = inbox
        self._timeout = timeout
        self._queue: asyncio.Queue[tuple[Command, bytes, asyncio.Future[Completion]]] = asyncio.Queue()
        self._waiters: set[asyncio.Task[Completion]] = set()
        self._task = asyncio.create_task(self._run())

    def enqueue(self, command: Command, body: bytes, reply: asyncio.Future[Completion]) -> None:
        """Send after all that was enqueued before."""
        self._queue.put_nowait((command, body, reply))

    async def close(self) -> None:
        """Let what is enqueued leave, then stop."""
        await self._queue.join()
        self._task.cancel()
        for waiter in self._waiters:
            waiter.cancel()
        await asyncio.gather(self._task, *self._waiters, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            command, body, reply = await self._queue.get()
            try:
                await self._submit(command, body)
                waiter = asyncio.create_task(self._inbox.wait(command.id))
                waiter.add_done_callback(partial(_pass_on, reply))
                self._waiters.add(waiter)
                waiter.add_done_callback(self._waiters.discard)
            except TinsmithError as error:
                if not reply.done():
                    reply.set_exception(error.at(model=command.model, command=command.id))
            finally:
                self._queue.task_done()

    async def _submit(self, command: Command, body: bytes) -> None:
        """Submit until the bus has it. Raises the last Busy or BusUnreachable after the timeout, or what forbids it."""
        pause, longest = RETRY_SECONDS
        deadline = asyncio.get_running_loop().time() + self._timeout
        while True:
            try:
                await self._inbox.submit(command, body)
                return
            except (Busy, BusUnreachable):
                if asyncio.get_running_loop().time() + pause > deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)


def _pass_on(reply: asyncio.Future[Completion], delivered: asyncio.Task[Completion]) -> None:
    if reply.done():
        return
    if delivered.cancelled():
        reply.cancel()
    elif (error := delivered.exception()) is not None:
        reply.set_exception(error)
    else:
        reply.set_result(delivered.result())

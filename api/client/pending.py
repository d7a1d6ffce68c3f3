"""A call that was enqueued: await it for its result, as often and from as many tasks as you like."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from tinsmith.bus.protocol.envelope import Command, Event
from tinsmith.bus.protocol.errors import DeadlineExceeded, TinsmithError

T = TypeVar("T")
Completion = tuple[Event, bytes]


class Pending(Generic[T]):
    """A command on its way. `command.id` finds it again on the bus, from any process."""

    def __init__(self, command: Command, reply: asyncio.Future[Completion], read: Callable[[Event, bytes], T]) -> None:
        self.command = command
        self._reply = reply
        self._read = read
        # A caller may never await a failed call; its failure is in the event stream all the same.
        reply.add_done_callback(_mark_seen)

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait(None).__await__()

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._reply.done()

    async def result(self, timeout: float) -> T:
        """As `await`, but raises DeadlineExceeded after `timeout` seconds; the command itself goes on."""
        return await self._wait(timeout)

    async def _wait(self, timeout: float | None) -> T:
        try:
            # Shielded: one waiter that is cancelled must not take the reply from the others.
            event, body = await asyncio.wait_for(asyncio.shield(self._reply), timeout)
        except TimeoutError:
            raise DeadlineExceeded(
                f"no result within {timeout:g} s; the command goes on",
                remedy="Await it again, or read its event later.",
                model=self.command.model,
                command=self.command.id,
            ) from None
        if event.error is not None:
            raise TinsmithError.from_wire(event.error)
        return self._read(event, body)


def _mark_seen(reply: asyncio.Future[Completion]) -> None:
    if not reply.cancelled():
        reply.exception()

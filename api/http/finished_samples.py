"""Which samples of which sampling session have ended: one reader of the sampling lane's events for all that wait.

A client with a thousand samples under way asks once for all of them, instead of holding a connection for each.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field

from tinsmith.bus.bus import Bus
from tinsmith.bus.events import Streamed
from tinsmith.bus.protocol.envelope import SAMPLE_LANE, Event
from tinsmith.bus.protocol.errors import BusUnreachable

CLONE = 1_000_000_000
"""A client that was copied to another process numbers its samples from a multiple of this."""
KEPT = 50_000
"""Ended samples that are remembered, of all sampling sessions."""

Target = tuple[str, int]
"""Sampling session and clone."""


@dataclass
class _Ended:
    """Of one target, in the order in which they ended."""

    numbers: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


class Completions:
    """Follows the lane from `start` to `close`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._ended: OrderedDict[Target, _Ended] = OrderedDict()
        self._count = 0
        self._more = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to read, from the oldest event that is kept."""
        self._task = asyncio.create_task(self._follow(), name="tinsmith-completions")

    async def close(self) -> None:
        """Stop reading."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def after(self, target: Target, cursor: int, seconds: float) -> list[Event]:
        """Events of the target's samples whose number is above `cursor`; waits for the first for `seconds`."""
        try:
            async with asyncio.timeout(seconds), self._more:
                while not (found := self._found(target, cursor)):
                    await self._more.wait()
                return found
        except TimeoutError:
            return self._found(target, cursor)

    def _found(self, target: Target, cursor: int) -> list[Event]:
        ended = self._ended.get(target)
        return ended.events[bisect_right(ended.numbers, cursor) :] if ended is not None else []

    async def _follow(self) -> None:
        since: dict[str, str] = {SAMPLE_LANE: "0"}
        while True:
            try:
                async for item in self._bus.events([SAMPLE_LANE], since):
                    if isinstance(item, Streamed):
                        since = {SAMPLE_LANE: item.id}
                        await self._note(item.event)
            except BusUnreachable:
                await asyncio.sleep(0.5)  # Then on from the last one that was read.

    async def _note(self, event: Event) -> None:
        target = target_of(event.id)
        if target is None:
            return
        ended = self._ended.setdefault(target, _Ended())
        ended.numbers.append(event.n)
        ended.events.append(event)
        self._ended.move_to_end(target)
        self._count += 1
        while self._count > KEPT and len(self._ended) > 1:
            _, oldest = self._ended.popitem(last=False)
            self._count -= len(oldest.events)
        async with self._more:
            self._more.notify_all()


def target_of(request: str) -> Target | None:
    """Whose sample a command of the lane is; None when it came through another gateway. Pure."""
    sampler, _, seq = request.rpartition(":")
    return (sampler, int(seq) // CLONE) if sampler and seq.isdigit() else None

"""A lane: a queue without order whose commands are answered side by side, as many at once as there is room for."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod

from tinsmith.actors.service.leases import Leases
from tinsmith.actors.training.outcome import Outcome
from tinsmith.actors.training.runner import make_event
from tinsmith.bus.bus import Bus
from tinsmith.bus.ownership import Taken
from tinsmith.bus.protocol.envelope import Kind
from tinsmith.bus.protocol.errors import CommandFailed, Fenced, InvalidInput, TinsmithError

log = logging.getLogger("tinsmith.lane")

FETCH_UNORDERED = 64
"""Commands fetched from a lane at once."""


class Lane(ABC):
    """Takes commands of one kind from the queue `name` and completes each with what `carry_out` makes of it."""

    def __init__(self, name: str, kind: Kind, bus: Bus, leases: Leases, room: int) -> None:
        self._name = name
        self._kind = kind
        self._bus = bus
        self._leases = leases
        self._room = room
        self._rung = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._epoch = -1
        self._failure: BaseException | None = None

    @abstractmethod
    async def carry_out(self, taken: Taken) -> Outcome:
        """What becomes of one command; an error that is raised is its outcome."""

    def completed(self, taken: Taken, outcome: Outcome) -> None:  # noqa: B027 - a lane need not care
        """The bus has the outcome."""

    def ring(self) -> None:
        """The lane may have commands."""
        self._rung.set()

    async def run(self) -> None:
        """Take and answer for ever. Raises what kept an outcome from the bus: the lane's next owner takes it again."""
        self._epoch = await self._leases.own(self._name)
        while True:
            # Before the look, not after it: what rings meanwhile must be looked for again.
            self._rung.clear()
            if self._failure is not None:
                raise self._failure
            room = self._room - len(self._tasks)
            taken = []
            if room > 0:
                taken = await self._bus.next(self._name, self._epoch, min(FETCH_UNORDERED, room))
            for one in taken:
                task = asyncio.create_task(self._answer(one))
                self._tasks.add(task)
                task.add_done_callback(self._ended)
            if not taken:
                await self._rung.wait()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._rung.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error

    async def _answer(self, taken: Taken) -> None:
        begun = time.time()
        outcome = await self._outcome(taken)
        event = make_event(taken, outcome, begun, time.time() - begun)
        try:
            await self._bus.complete(self._name, self._epoch, taken.entry_id, event, outcome.body, keep=False)
        except Fenced:
            log.warning("%s is another coordinator's now", self._name)
            return
        self.completed(taken, outcome)

    async def _outcome(self, taken: Taken) -> Outcome:
        kind = taken.command.kind
        if kind is not self._kind:
            return Outcome(
                error=InvalidInput(f"{kind.value} is no command of this lane", remedy=f"Send {self._kind.value}.")
            )
        try:
            return await self.carry_out(taken)
        except TinsmithError as error:
            return Outcome(error=error)
        except Exception as error:
            log.exception("%s could not be carried out", taken.command.id)
            return Outcome(error=CommandFailed(f"{type(error).__name__}: {error}", remedy="See the coordinator's log."))

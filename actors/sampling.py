"""The sampling lane: takes sampling commands without order, gives each to the least busy replica, completes it.

Sampling changes nothing, so a replica that dies costs only time: what it had is given to a fresh one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import ray

from tinsmith.actors.gather import Outcome
from tinsmith.actors.leases import Leases
from tinsmith.actors.options import ServiceOptions
from tinsmith.actors.pool import Replica, build_samplers
from tinsmith.actors.training import make_event
from tinsmith.bus.consumer import Taken
from tinsmith.bus.envelope import SAMPLE_LANE
from tinsmith.bus.errors import CommandFailed, Fenced, TinsmithError
from tinsmith.bus.streams import Bus

log = logging.getLogger("tinsmith.sampling")

TAKE = 64
"""Commands fetched from the lane at once."""


class SamplingLane:
    """The sampler replicas and what they are busy with."""

    def __init__(self, bus: Bus, replicas: list[Replica], options: ServiceOptions, leases: Leases) -> None:
        self._bus = bus
        self._replicas = replicas
        self._busy = [0] * len(replicas)
        self._options = options
        self._leases = leases
        self._rung = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._rebuilding = asyncio.Lock()
        self._epoch = -1
        self.counters = {"samples": 0, "sampled_tokens": 0, "replicas_lost": 0}

    def ring(self) -> None:
        """The lane may have commands."""
        self._rung.set()

    def status(self) -> dict[str, Any]:
        """Process of each replica, requests with it, and what was done."""
        return {"pids": [replica.pid for replica in self._replicas], "busy": list(self._busy), **self.counters}

    async def run(self) -> None:
        """Take and answer for ever."""
        self._epoch = await self._leases.own(SAMPLE_LANE)
        while True:
            # Before the look, not after it: what rings meanwhile must be looked for again.
            self._rung.clear()
            room = self._options.max_pending_samples - len(self._tasks)
            taken = []
            if room > 0:
                taken = await self._bus.next(SAMPLE_LANE, self._epoch, min(TAKE, room))
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
            log.error("a sampling command was not completed", exc_info=error)

    async def _answer(self, taken: Taken) -> None:
        begun = time.time()
        outcome = await self._sample(taken)
        event = make_event(taken, outcome, begun, time.time() - begun)
        try:
            await self._bus.complete(SAMPLE_LANE, self._epoch, taken.entry_id, event, outcome.body, keep=False)
        except Fenced:
            log.warning("the sampling lane is another coordinator's now")

    async def _sample(self, taken: Taken) -> Outcome:
        if not self._replicas:
            return Outcome(error=CommandFailed("this service has no samplers", remedy="Serve with --samplers 1."))
        for _ in range(self._options.max_attempts):
            number = min(range(len(self._busy)), key=self._busy.__getitem__)
            replica = self._replicas[number]
            self._busy[number] += 1
            try:
                reply = await replica.actor.sample.remote(taken.command.id, taken.command.args, taken.body)
            except ray.exceptions.RayActorError:
                await self._replace(number, replica)
                continue
            except ray.exceptions.RayError as error:
                return Outcome(error=CommandFailed(f"the sampler failed: {error}", remedy="See the sampler's log."))
            finally:
                self._busy[number] -= 1
            if isinstance(reply, dict):
                return Outcome(error=TinsmithError.from_wire(reply))
            result, body = reply
            self.counters["samples"] += 1
            self.counters["sampled_tokens"] += result.get("sampled_tokens", 0)
            return Outcome(result=result, body=body)
        return Outcome(error=CommandFailed("its sampler died each time", remedy="See the samplers' log."))

    async def _replace(self, number: int, dead: Replica) -> None:
        """A fresh replica in the dead one's place; the first of its callers makes it, the others wait."""
        async with self._rebuilding:
            if self._replicas[number] is dead:
                self.counters["replicas_lost"] += 1
                self._replicas[number] = (await build_samplers(self._options, [number]))[0]

"""The sampling lane: gives each sampling command to the least busy replica, and sends parts of it on as they come.

Sampling changes nothing, so a replica that dies costs only time: what it had is given to a fresh one.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import Any

import ray

from tinsmith.actors.sampling.lane import Lane
from tinsmith.actors.service.leases import Leases
from tinsmith.actors.service.options import ServiceOptions
from tinsmith.actors.training.outcome import Outcome
from tinsmith.actors.workers.group import Replica, build_samplers
from tinsmith.bus.bus import Bus
from tinsmith.bus.ownership import Taken
from tinsmith.bus.protocol.envelope import SAMPLE_LANE, Kind
from tinsmith.bus.protocol.errors import BusError, Cancelled, CommandFailed, TinsmithError, cancelled
from tinsmith.bus.protocol.parts import Part

log = logging.getLogger("tinsmith.sampling")

CANCEL_AGAIN_SECONDS = 0.2
"""How often a replica is told again to stop a command: the first time it may not have had it yet."""


class SamplingLane(Lane):
    """The sampler replicas and what they are busy with."""

    def __init__(self, bus: Bus, replicas: list[Replica], options: ServiceOptions, leases: Leases) -> None:
        super().__init__(SAMPLE_LANE, Kind.SAMPLE, bus, leases, options.max_pending_samples)
        self._replicas = replicas
        self._busy = [0] * len(replicas)
        self._options = options
        self._rebuilding = asyncio.Lock()
        self._places: dict[str, Replica] = {}
        self._cancels: dict[str, asyncio.Future[bool]] = {}
        self.counters = {"samples": 0, "sampled_tokens": 0, "cancelled": 0, "replicas_lost": 0}

    def status(self) -> dict[str, Any]:
        """Process of each replica, requests with it, and what was done."""
        return {"pids": [replica.pid for replica in self._replicas], "busy": list(self._busy), **self.counters}

    async def watch(self) -> None:
        """Replace for ever what dies, so that not the next request but this moment pays for the start."""
        await asyncio.gather(*(self._watch(number) for number in range(len(self._replicas))))
        await asyncio.Event().wait()

    async def _watch(self, number: int) -> None:
        while True:
            replica = self._replicas[number]
            try:
                await replica.actor.live.remote()
            except ray.exceptions.RayActorError:
                await self._replace(number, replica)

    async def cancel(self, command: str) -> bool:
        """Stop a command of this lane and wait until it has ended; False when it ended by itself before."""
        over = self._cancels.setdefault(command, asyncio.get_running_loop().create_future())
        # Asked only now: a command that ends after the line above resolves `over`.
        stands = await self._bus.stands(command)
        if stands is None or stands[1] == "done":
            self._cancels.pop(command, None)
            return over.done() and over.result()
        while not over.done():
            if (replica := self._places.get(command)) is not None:
                try:
                    await replica.actor.cancel.remote(command)
                except ray.exceptions.RayError as error:
                    log.warning("a sampler could not be told to stop %s: %s", command, error)
            await asyncio.wait([over], timeout=CANCEL_AGAIN_SECONDS)
        return over.result()

    async def carry_out(self, taken: Taken) -> Outcome:
        """Have it sampled, by another replica when one dies over it."""
        if not self._replicas:
            return Outcome(error=CommandFailed("this service has no samplers", remedy="Serve with --samplers 1."))
        sent: dict[int, int] = {}
        for _ in range(self._options.max_attempts):
            if taken.command.id in self._cancels:
                return Outcome(error=cancelled())
            number = min(range(len(self._busy)), key=self._busy.__getitem__)
            replica = self._replicas[number]
            self._busy[number] += 1
            self._places[taken.command.id] = replica
            try:
                reply = await self._ask(replica, taken, sent)
            except ray.exceptions.RayActorError:
                await self._replace(number, replica)
                continue
            except ray.exceptions.RayError as error:
                return Outcome(error=CommandFailed(f"the sampler failed: {error}", remedy="See the sampler's log."))
            finally:
                self._busy[number] -= 1
                self._places.pop(taken.command.id, None)
            if isinstance(reply, dict):
                return Outcome(error=TinsmithError.from_wire(reply))
            result, body = reply
            self.counters["samples"] += 1
            self.counters["sampled_tokens"] += result.get("sampled_tokens", 0)
            return Outcome(result=result, body=body)
        return Outcome(error=CommandFailed("its sampler died each time", remedy="See the samplers' log."))

    def completed(self, taken: Taken, outcome: Outcome) -> None:
        """Tell whoever wanted it stopped."""
        stopped = isinstance(outcome.error, Cancelled)
        self.counters["cancelled"] += stopped
        if (over := self._cancels.pop(taken.command.id, None)) is not None:
            over.set_result(stopped)

    async def _ask(self, replica: Replica, taken: Taken, sent: dict[int, int]) -> Any:
        """The replica's reply; parts go to the submitter on the way. sent: tokens by sample that went already."""
        id, args = taken.command.id, taken.command.args
        if not args.get("stream") or taken.reply_to is None:
            return await replica.actor.sample.remote(id, args, taken.body)
        if args.get("seed") is None:
            # What was sent can't be taken back: should this begin again elsewhere, it must give the same tokens.
            args = {**args, "seed": seed_of(id)}
        reply = None
        async for reference in replica.actor.stream.options(num_returns="streaming").remote(id, args, taken.body):
            reply = await reference
            if isinstance(reply, list):
                await self._send(taken.reply_to, id, unsent(reply, sent))
        return reply

    async def _send(self, reader: str, id: str, parts: list[Part]) -> None:
        try:
            if parts:
                await self._bus.put_parts(reader, id, parts)
        except BusError as error:
            # The result comes whole all the same.
            log.warning("parts of %s were not sent: %s", id, error)

    async def _replace(self, number: int, dead: Replica) -> None:
        """A fresh replica in the dead one's place; the first of its callers makes it, the others wait."""
        async with self._rebuilding:
            if self._replicas[number] is dead:
                self.counters["replicas_lost"] += 1
                self._replicas[number] = (await build_samplers(self._options, [number]))[0]


def seed_of(command: str) -> int:
    """A seed in [0, 2**63) that is always the same for a command. Pure."""
    return int.from_bytes(hashlib.blake2b(command.encode(), digest_size=8).digest()) >> 1


def unsent(parts: list[Part], sent: dict[int, int]) -> list[Part]:
    """The parts beyond what was sent of each sample, which is noted in `sent`."""
    fresh = [part for part in parts if part.at >= sent.get(part.index, 0)]
    for part in fresh:
        sent[part.index] = part.at + len(part.tokens)
    return fresh

"""The coordinator: a detached async Ray actor that owns models, listens to the doorbell and keeps the lanes going.

It holds no state that the bus or the ranks do not hold: Ray restarts it after a crash, it takes the leases in a new
epoch, asks each rank for its position, and goes on, or has the group rebuilt.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import Any

import ray

from tinsmith.actors.metrics import Catalogue
from tinsmith.actors.sampling.cancellation import ControlLane
from tinsmith.actors.sampling.dispatcher import SamplingLane
from tinsmith.actors.sampling.lane import Lane
from tinsmith.actors.service.disk import DiskReport
from tinsmith.actors.service.leases import Leases
from tinsmith.actors.service.options import ServiceOptions
from tinsmith.actors.training.runner import TrainingLane
from tinsmith.actors.workers.group import (
    Group,
    build_group,
    build_samplers,
    destroy_group,
    destroy_samplers,
    find_group,
)
from tinsmith.bus.bus import Bus
from tinsmith.bus.connection import open_bus
from tinsmith.bus.protocol.envelope import CONTROL_LANE, LANES, SAMPLE_LANE, new_id
from tinsmith.bus.protocol.errors import TinsmithError
from tinsmith.bus.status import put_status

log = logging.getLogger("tinsmith.coordinator")

BELL_MS = 5000
"""How long one blocking read of the doorbell lasts."""
RESTART_SECONDS = 1.0
"""Pause before another try at a restart that failed."""
STATUS_SECONDS = 2.0
"""How often the service's status is written on the bus."""


class Coordinator:
    """One service. Everything begins with the first call of `ready`, also after a restart."""

    def __init__(self, options: ServiceOptions) -> None:
        self._options = options
        self._phase = "starting"
        self._begun = time.time()
        self._bus: Bus | None = None
        self._training: TrainingLane | None = None
        self._sampling: SamplingLane | None = None
        self._lanes: dict[str, Lane] = {}
        self._leases: Leases | None = None
        self._catalogue: Catalogue | None = None
        self._disk = DiskReport(options.state_dir)
        self._failure: str | None = None
        self._start = asyncio.get_event_loop().create_task(self._run())
        self._ready: asyncio.Future[None] = asyncio.get_event_loop().create_future()

    async def ready(self) -> dict[str, Any]:
        """Wait until commands are taken; returns the base model's facts. Raises the typed cause of a failed start."""
        await asyncio.shield(self._ready)
        assert self._training is not None
        return self._training.group.facts

    async def phase(self) -> str:
        """What it is doing, in a few words."""
        return self._phase

    async def stop(self) -> None:
        """Take no more commands, give the leases back, take the ranks and samplers down."""
        self._phase = "stopping"
        self._start.cancel()
        await asyncio.gather(self._start, return_exceptions=True)
        if self._leases is not None:
            try:
                await asyncio.wait_for(self._leases.release(), 2.0)
            except (TinsmithError, TimeoutError) as error:
                log.warning("leases were not released, they run out by themselves: %s", error)
        await asyncio.gather(destroy_group(self._options), destroy_samplers(self._options))
        if self._bus is not None:
            await self._bus.close()

    async def _run(self) -> None:
        try:
            tasks = await self._begin()
        except Exception as error:
            if ray.get_runtime_context().was_current_actor_reconstructed:
                # It worked before, so the cause may pass (a bus that is down): try again from the beginning.
                log.exception("the coordinator could not start again")
                await asyncio.sleep(RESTART_SECONDS)
                os._exit(1)
            self._phase = "failed"
            self._ready.set_exception(error)
            self._ready.exception()
            return
        self._phase = "ready"
        self._ready.set_result(None)
        running = [asyncio.create_task(task) for task in tasks]
        try:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            failures = [cause for task in done if (cause := task.exception()) is not None]
            # A loop that ends is a fault of ours: die, and let Ray start a fresh coordinator over the same ranks.
            log.critical("the coordinator can't go on", exc_info=failures[0] if failures else None)
            os._exit(1)
        finally:
            for task in running:
                task.cancel()

    async def _begin(self) -> list[Any]:
        options = self._options
        self._catalogue = Catalogue.load([Path(overlay) for overlay in options.metrics])
        self._phase = "opening the bus"
        bus = self._bus = await open_bus(options.bus_url, options.bus)
        leases = self._leases = Leases(bus, new_id(), options.lease_ms)
        self._phase = f"loading {options.alias} on {options.ranks} ranks and {options.samplers} samplers"
        # Together: most of a start is importing torch, and each does that in a process of its own.
        group, replicas = await asyncio.gather(self._group(), build_samplers(options, range(options.samplers)))
        self._training = TrainingLane(bus, group, self._catalogue, options, leases)
        self._sampling = SamplingLane(bus, replicas, options, leases)
        self._lanes = {SAMPLE_LANE: self._sampling, CONTROL_LANE: ControlLane(bus, leases, self._sampling)}
        leases.on_lost = self._training.lose
        renew = asyncio.create_task(leases.renew_for_ever())
        self._phase = "restoring models"
        _, last = await bus.bell("$", 1)
        await self._adopt(bus, group, self._training)
        lanes = [lane.run() for lane in self._lanes.values()]
        return [
            _await(renew),
            self._listen(bus, last),
            self._training.run(),
            *lanes,
            self._sampling.watch(),
            self._report(bus),
        ]

    async def _group(self) -> Group:
        return await find_group(self._options) or await build_group(self._options)

    async def _adopt(self, bus: Bus, group: Group, training: TrainingLane) -> None:
        """Every model of the bus: as the ranks hold it when all agree on all models, else restored on fresh ranks."""
        models = [model for model in await bus.all_models() if model not in LANES]
        positions = await group.positions(self._options.step_deadline)
        agree = all(position == positions[0] for position in positions) and all(
            at[0] == bus.incarnation for at in positions[0].values()
        )
        if not agree:
            training.group = await build_group(self._options)
        for model in models:
            self._phase = f"restoring {model}"
            if (await bus.meta(model)).get("state") == "live":
                await training.adopt(model)

    async def _listen(self, bus: Bus, last: str) -> None:
        assert self._training is not None
        while True:
            models, last = await bus.bell(last, BELL_MS)
            # The bell is a hint; when it is quiet, look whether one was missed.
            for model in models or await bus.models_with_backlog():
                if model in self._lanes:
                    self._lanes[model].ring()
                else:
                    self._training.ring(model)

    async def _report(self, bus: Bus) -> None:
        """Write the status where any program that can reach the bus may read it."""
        while True:
            await put_status(bus, self._status(), STATUS_SECONDS * 5)
            await asyncio.sleep(STATUS_SECONDS)

    def _status(self) -> dict[str, Any]:
        assert self._training is not None
        assert self._sampling is not None
        assert self._catalogue is not None
        return {
            "phase": self._phase,
            "at": time.time(),
            "since": self._begun,
            "pid": os.getpid(),
            "base": self._options.alias,
            "bus": self._options.bus,
            "state": self._options.state_dir,
            "disk": self._disk.latest(),
            "trainer": {**self._training.group.facts, **self._training.counters},
            "sampler": self._sampling.status(),
            "models": self._training.models(),
            "metrics": {
                "unmapped_columns": dict(self._catalogue.unmapped),
                "non_finite": dict(self._catalogue.non_finite),
            },
        }


async def _await(task: asyncio.Task[None]) -> None:
    await task

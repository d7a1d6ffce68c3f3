"""What a service costs by being there: its start, its idling, and what its memory does over many steps."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

from tinsmith.api import Model, Pending, connect
from tinsmith.ops.bench.processes import cpu_seconds, megabytes, own_processes, ray_processes
from tinsmith.ops.bench.random_llama import make_data
from tinsmith.ops.bench.row import Row, at_most
from tinsmith.ops.bench.stage import TINY_VOCAB, Stage

SETTLE_SECONDS, IDLE_SECONDS = 3.0, 10.0
EARLY, LATE = 100, 1000
"""Steps after which memory is read."""
AHEAD = 10
"""Steps that the client keeps enqueued."""
GROWTH_MB = 10.0


async def start(stage: Stage) -> list[Row]:
    """Seconds from the command `tinsmith serve` to `ready`."""
    return [at_most("start", (await stage.tiny()).seconds, 40.0, "s", "tiny model, 2 ranks, 1 sampler")]


async def idle(stage: Stage) -> list[Row]:
    """CPU used by a service that nobody asks anything, in percent of one core."""
    running = await stage.tiny()
    await asyncio.sleep(SETTLE_SECONDS)
    groups = {name: [process] for name, process in own_processes(running.url).items()}
    groups["Ray's processes"] = ray_processes(running.url)
    before = {name: sum(map(cpu_seconds, members)) for name, members in groups.items()}
    begun = time.monotonic()
    await asyncio.sleep(IDLE_SECONDS)
    seconds = time.monotonic() - begun
    used = {name: 100 * (sum(map(cpu_seconds, members)) - before[name]) / seconds for name, members in groups.items()}
    rays = used.pop("Ray's processes")
    note = ", ".join(f"{name} {share:.1f}" for name, share in used.items())
    return [
        at_most("idle", sum(used.values()), 3.0, "% of a core", note),
        Row("idle: Ray", rays, "% of a core", note="Ray's own processes"),
    ]


async def memory(stage: Stage) -> list[Row]:
    """Resident memory of each of our processes after 100 and after 1,000 steps of one tiny model."""
    running = await stage.tiny()
    processes = own_processes(running.url)
    async with connect(running.url) as client:
        model = await client.create_model("tiny", lora_rank=4)
        await _train(model, EARLY)
        early = {name: megabytes(process) for name, process in processes.items()}
        await _train(model, LATE - EARLY)
        late = {name: megabytes(process) for name, process in processes.items()}
        await model.unload()
    return [
        Row(
            f"memory: {name}",
            late[name],
            "MB",
            early[name],
            late[name] / early[name],
            f"grows <= {GROWTH_MB:g} MB",
            late[name] - early[name] <= GROWTH_MB,
            f"after {LATE} and after {EARLY} steps: {late[name] - early[name]:+.1f} MB",
        )
        for name in processes
    ]


async def _train(model: Model, steps: int) -> None:
    data = make_data(np.full(4, 12), TINY_VOCAB)
    for begin in range(0, steps, AHEAD):
        sent: list[Pending[Any]] = []
        for _ in range(min(AHEAD, steps - begin)):
            sent += [model.forward_backward(data, "cross_entropy"), model.optim_step(lr=1e-3)]
        for pending in sent:
            await pending

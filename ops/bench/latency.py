"""The price of the way: a command that computes nothing, beside the hops that it can't do without."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

from redis.asyncio import Redis

from tinsmith.api import connect
from tinsmith.api.address import URL_FILE
from tinsmith.ops.bench.processes import ray_address
from tinsmith.ops.bench.row import Row, slower_by
from tinsmith.ops.bench.stage import Stage

ROUNDS, CALLS = 12, 25


async def empty_step(stage: Stage) -> list[Row]:
    """p50 of `await model.info()` on 2 ranks, beside one Redis round trip and one Ray call to the same ranks."""
    import ray

    running = await stage.tiny()
    redis = Redis.from_url((Path(running.url) / URL_FILE).read_text())
    common: dict[str, Any] = {"logging_level": "error", "log_to_driver": False}
    await asyncio.to_thread(ray.init, address=ray_address(running.url), **common)
    try:
        ranks = [ray.get_actor(f"rank-{rank}", namespace="tinsmith-tinsmith") for rank in range(2)]
        async with connect(running.url) as client:
            model = await client.create_model("tiny", lora_rank=4)

            async def both() -> None:
                await asyncio.gather(*[rank.positions.remote() for rank in ranks])

            async def info() -> None:
                await model.info()

            async def ping() -> None:
                await redis.ping()

            taken = await _in_turns({"info": info, "redis": ping, "ray": both})
            await model.unload()
    finally:
        await redis.aclose()
        ray.shutdown()
    reference = taken["redis"] + taken["ray"]
    note = f"Redis {taken['redis']:.2f} + Ray {taken['ray']:.2f} ms, p50"
    return [slower_by("empty_step", taken["info"], reference, 3.0, "ms", note)]


async def _in_turns(calls: dict[str, Callable[[], Awaitable[None]]]) -> dict[str, float]:
    """Name -> p50 in milliseconds, all of them measured in turns."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 1):
        for name, call in calls.items():
            for _ in range(CALLS):
                begun = time.perf_counter()
                await call()
                # The first turn warms connections and caches up.
                if turn:
                    taken[name].append(1000 * (time.perf_counter() - begun))
    return {name: median(values) for name, values in taken.items()}

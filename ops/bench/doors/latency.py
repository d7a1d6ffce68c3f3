"""The price of the way: a command that computes nothing, beside the hops that it can't do without.

Only the program that started a local Ray cluster may call its actors, so the service runs from this process here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from statistics import median

import ray
from redis.asyncio import Redis

from tinsmith.actors.service.options import ServiceOptions
from tinsmith.actors.service.start import start_ray, start_service, stop_ray, stop_service
from tinsmith.api import connect
from tinsmith.bus.redis.embedded import EmbeddedServer
from tinsmith.ops.bench.row import Row, slower_by
from tinsmith.ops.bench.stage import Stage

ROUNDS, CALLS = 12, 25


async def empty_step(stage: Stage) -> list[Row]:
    """p50 of `await model.info()` on 2 ranks, beside one Redis round trip and one Ray call to the same ranks."""
    await stage.clear()
    async with _service(stage) as options:
        redis = Redis.from_url(options.bus_url)
        ranks = [ray.get_actor(f"rank-{rank}", namespace=options.service) for rank in range(options.ranks)]
        async with redis, connect(options.bus_url) as client:
            model = await client.create_model("tiny", lora_rank=4)

            async def call_ranks() -> None:
                await asyncio.gather(*[rank.positions.remote() for rank in ranks])

            async def info() -> None:
                await model.info()

            async def ping() -> None:
                await redis.ping()

            taken = await _in_turns({"info": info, "redis": ping, "ray": call_ranks})
    reference = taken["redis"] + taken["ray"]
    note = f"Redis {taken['redis']:.2f} + Ray {taken['ray']:.2f} ms, p50"
    return [slower_by("empty_step", taken["info"], reference, 3.0, "ms", note)]


@asynccontextmanager
async def _service(stage: Stage) -> AsyncIterator[ServiceOptions]:
    model, state = stage.tiny_model(), stage.folder / "latency"
    server = EmbeddedServer()
    try:
        url = await asyncio.to_thread(server.start, state)
        options = ServiceOptions(model_path=str(model), alias="tiny", state_dir=str(state), bus_url=url, samplers=0)
        await asyncio.to_thread(start_ray, None)
        await start_service(options, lambda text: None)
        yield options
        await stop_service(options)
    finally:
        await asyncio.to_thread(stop_ray)
        await asyncio.to_thread(server.stop)


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

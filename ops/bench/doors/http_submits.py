"""The door without the SDK: requests a second, and what it costs that many futures wait."""

from __future__ import annotations

import asyncio
import resource
import time
from statistics import median
from typing import Any

from tinsmith.ops.bench.doors.http_client import RawClient, sample_body, step_body
from tinsmith.ops.bench.doors.http_service import HttpService
from tinsmith.ops.bench.row import Row, at_least, slower_by
from tinsmith.ops.bench.stage import Stage

CONNECTIONS = 32
ROUNDS, SUBMITS = 3, 600
FEW, MANY = 100, 2000
PROBES = 100
OPEN_FILES = 8192
FIRST_STEP = 2
"""Turn 1 of a model is left open, so that those behind it wait until it is taken."""


async def http_submits(stage: Stage) -> list[Row]:
    """Samples accepted a second over 32 connections, while they are sampled."""
    service = await stage.http()
    async with RawClient(service.address, CONNECTIONS) as client:
        sampler = await client.sampler(service.alias)
        rates, seq = [], 0
        futures: list[dict[str, Any]] = []
        for _ in range(ROUNDS + 1):
            begun = time.perf_counter()
            bodies = [sample_body(sampler, seq + n, 1) for n in range(SUBMITS)]
            futures += await client.all("asample", bodies)
            rates.append(SUBMITS / (time.perf_counter() - begun))
            seq += SUBMITS
            # The next round begins when the sampler has nothing left of this one.
            await client.post("retrieve_future", {"request_id": futures[-1]["request_id"]})
    # The first round makes the connections.
    note = f"POST asample, {CONNECTIONS} connections, rounds {min(rates[1:]):.0f} to {max(rates[1:]):.0f}"
    return [at_least("http_submits", median(rates[1:]), 300.0, "requests/s", note)]


async def http_waiting(stage: Stage) -> list[Row]:
    """A future's whole cost to the door, and the latency of a submit, where few wait and where many do."""
    service = await stage.http()
    _allow_open_files(OPEN_FILES)
    costs: dict[int, float] = {}
    latencies: dict[int, float] = {}
    # Each once before it counts: what is imported and connected first would be charged to the few.
    for count in (FEW, FEW, MANY):
        costs[count], latencies[count] = await _wait(service, count)
    note = f"CPU of replica and proxy from the request to its result, {MANY} waiting beside {FEW}"
    return [
        slower_by("http_waiting: a future", costs[MANY], costs[FEW], 1.25, "ms of CPU", note),
        slower_by(
            "http_waiting: a submit",
            *(latencies[MANY], latencies[FEW], 1.5, "ms"),
            f"p50 of {PROBES}, one after the other, {MANY} futures waiting beside {FEW}",
        ),
    ]


async def _wait(service: HttpService, count: int) -> tuple[float, float]:
    """CPU in milliseconds of one of so many futures that wait together, and a submit's latency meanwhile."""
    async with RawClient(service.address, count + 1) as client, RawClient(service.address, 1) as prober:
        model, sampler = await client.model(service.alias), await prober.sampler(service.alias)
        before = service.door_seconds()
        sent = await client.all("optim_step", [step_body(model, FIRST_STEP + n) for n in range(count)])
        waiting = [asyncio.create_task(client.post("retrieve_future", future)) for future in sent]
        await _arrived(service)
        submitted = service.door_seconds() - before
        latencies = [await prober.timed("asample", sample_body(sampler, n, 1)) for n in range(PROBES)]
        before = service.door_seconds()
        # Without a gradient each of them fails, which takes next to nothing.
        await client.post("optim_step", step_body(model, 1))
        await asyncio.gather(*waiting)
        cost = submitted + service.door_seconds() - before
    return 1000 * cost / count, 1000 * median(latencies)


async def _arrived(service: HttpService) -> None:
    """Return when the door has nothing more to do for those that wait."""
    used = service.door_seconds()
    while True:
        await asyncio.sleep(0.5)
        before, used = used, service.door_seconds()
        if used - before < 0.05:
            return


def _allow_open_files(count: int) -> None:
    """A connection is an open file of this program."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))

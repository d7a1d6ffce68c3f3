"""Sampling through the official SDK: the latency of one token, the gain of many at once, and a crowd."""

from __future__ import annotations

import asyncio
from statistics import median, quantiles

from tinsmith.ops.bench.doors.http_client import RawClient
from tinsmith.ops.bench.doors.sdk import SdkClient, has_sdk, sdk_clients
from tinsmith.ops.bench.row import Row, at_most, faster_by
from tinsmith.ops.bench.stage import Stage

SINGLES = 60
TOGETHER, TOKENS, ROUNDS = 64, 64, 3
CROWD, LARGE_CROWD, CROWD_TOKENS = 512, 2000, 8
BEAT_SECONDS = 0.05
BEATS = 200
"""Connections for heartbeats: a slow one must not hold up the next."""


async def http_sampling(stage: Stage) -> list[Row]:
    """p50 of one sampled token, tokens a second of 64 samples beside one, and heartbeats beside 512."""
    if not has_sdk(stage, "http_sampling"):
        return []
    service = await stage.http()
    async with sdk_clients(stage, service, 1) as (client,), RawClient(service.address, BEATS) as other:
        await client.run("singles", count=10)
        singles = (await client.run("singles", count=SINGLES))["ms"]
        rates: dict[int, list[float]] = {1: [], TOGETHER: []}
        for _ in range(ROUNDS):
            for count, found in rates.items():
                seconds = (await client.run("sample", count=count, tokens=TOKENS))["seconds"]
                found.append(count * TOKENS / seconds)
        took, waits = await _crowd(client, other, CROWD)
    return [
        at_most("http_sampling: one token", median(singles), 40.0, "ms", f"p50 of {SINGLES}, one after the other"),
        faster_by(
            f"http_sampling: {TOGETHER} at once",
            *(rates[TOGETHER], rates[1], 8.0, "tokens/s"),
            f"{TOKENS} tokens each, beside one alone",
        ),
        at_most(f"http_sampling: heartbeat beside {CROWD}", waits[18], 150.0, "ms", f"p95, p50 {waits[9]:.0f}; {took}"),
    ]


async def http_crowd(stage: Stage) -> list[Row]:
    """2,000 samples at once, none of which may fail."""
    if not has_sdk(stage, "http_crowd"):
        return []
    service = await stage.http()
    async with sdk_clients(stage, service, 1) as (client,), RawClient(service.address, BEATS) as other:
        took, waits = await _crowd(client, other, LARGE_CROWD)
    note = f"{took}, none failed; heartbeats meanwhile p50 {waits[9]:.0f}, p95 {waits[18]:.0f} ms"
    return [Row("http_crowd", float(LARGE_CROWD), "samples", target="none fails", ok=True, note=note)]


async def _crowd(client: SdkClient, other: RawClient, count: int) -> tuple[str, list[float]]:
    """How long the crowd took, and the 5th to 95th percentiles of another session's heartbeats meanwhile, in ms.

    Raises TinsmithError when a sample fails.
    """
    session = await other.session()
    crowd = asyncio.create_task(client.run("sample", count=count, tokens=CROWD_TOKENS))
    beats: list[asyncio.Task[float]] = []
    while not crowd.done():
        beats.append(asyncio.create_task(other.timed("session_heartbeat", {"session_id": session})))
        await asyncio.wait([crowd], timeout=BEAT_SECONDS)
    took = await crowd
    waits = quantiles([1000 * await beat for beat in beats], n=20)
    note = f"{count} samples of {CROWD_TOKENS} tokens at once in {took['seconds']:.1f} s"
    return f"{note}, of which the SDK itself computed {took['cpu']:.1f} s", waits

"""Training through the official SDK: what one client and several reach, and what a tenant that samples takes away."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from statistics import median
from typing import Any

import numpy as np

from tinsmith.api import Model, Pending, connect
from tinsmith.ops.bench.doors.http_service import HttpService
from tinsmith.ops.bench.doors.sdk import SdkClient, has_sdk, sdk_clients
from tinsmith.ops.bench.random_llama import make_data
from tinsmith.ops.bench.row import Row, at_least, slower_by
from tinsmith.ops.bench.stage import Stage
from tinsmith.ops.bench.workload import AHEAD, SMALL_DATUMS, SMALL_TOKENS, SMALL_VOCAB

CLIENTS = 4
ROUNDS, SECONDS = 3, 2.5
LONG_SAMPLE = 1500
STEPS = 12
"""Optimizer steps of one turn."""


async def http_training(stage: Stage) -> list[Row]:
    """Pipelined steps a second of one client and of four, and an optimizer step's latency beside a long sample."""
    if not has_sdk(stage, "http_training"):
        return []
    service = await stage.http()
    async with sdk_clients(stage, service, CLIENTS) as clients:
        # The first steps make connections and fill caches.
        await _train(clients, 0.5)
        one, four, bare = [], [], []
        for _ in range(ROUNDS):
            one.append(await _train(clients[:1], SECONDS))
            four.append(await _train(clients, SECONDS))
            bare.append(await _without_http(service, SECONDS))
        beside = await _beside_a_sample(*clients[:2])
    reference = median(bare)
    return [
        _speed("one client", one, 15.0, reference),
        _speed(f"{CLIENTS} clients", four, 25.0, reference),
        beside,
    ]


async def _train(clients: list[SdkClient], seconds: float) -> tuple[float, float]:
    """Steps a second of all clients, and cores that they used themselves."""
    done = await asyncio.gather(*(client.run("train", seconds=seconds) for client in clients))
    return sum(each["rate"] for each in done), sum(each["cpu"] / each["seconds"] for each in done)


async def _without_http(service: HttpService, seconds: float) -> float:
    """Steps a second of one program at the async door: what the ranks give where no HTTP is between."""
    data = make_data(np.full(SMALL_DATUMS, SMALL_TOKENS), SMALL_VOCAB)
    sent: deque[tuple[Pending[Any], Pending[Any]]] = deque()
    async with connect(service.state) as client:
        model: Model = await client.create_model(service.alias, lora_rank=4)
        done, begun = 0, time.perf_counter()
        while sent or time.perf_counter() - begun < seconds:
            more = time.perf_counter() - begun < seconds
            if more:
                sent.append((model.forward_backward(data, "cross_entropy"), model.optim_step(lr=1e-4)))
            if sent and (not more or len(sent) > AHEAD):
                for pending in sent.popleft():
                    await pending
                done += 1
        rate = done / (time.perf_counter() - begun)
        await model.unload()
    return rate


def _speed(who: str, rounds: list[tuple[float, float]], target: float, reference: float) -> Row:
    rates = [rate for rate, _ in rounds]
    cores = median(used for _, used in rounds)
    note = f"beside one program at the async door; rounds {min(rates):.1f} to {max(rates):.1f}"
    note += f"; the SDK itself used {cores:.2f} cores"
    return at_least(f"http_training: {who}", median(rates), target, "steps/s", note, reference=reference)


async def _beside_a_sample(mine: SdkClient, other: SdkClient) -> Row:
    idle: list[float] = []
    busy: list[float] = []
    sampled: list[float] = []
    for _ in range(ROUNDS):
        idle += (await mine.run("steps", count=STEPS))["ms"]
        sampling = asyncio.create_task(other.run("sample", count=1, tokens=LONG_SAMPLE))
        while not sampling.done():
            step = (await mine.run("steps", count=1))["ms"]
            # One that outlasted the sample was beside nothing for a part of it.
            busy += [] if sampling.done() else step
        sampled.append((await sampling)["seconds"])
    note = f"p50 of {len(busy)} steps while another tenant samples {LONG_SAMPLE} tokens in {median(sampled):.1f} s"
    return slower_by("http_training: beside a sample", median(busy), median(idle), 2.0, "ms", note)

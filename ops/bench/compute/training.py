"""Training through the service beside a bare FSDP2 loop on the same model, batch and micro-batches."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

from tinsmith.api import Datum, Model, connect
from tinsmith.bus.protocol.errors import TinsmithError
from tinsmith.ops.bench.row import Row, faster_by
from tinsmith.ops.bench.stage import Stage
from tinsmith.ops.bench.workload import LR, VOCAB, WORLD, training_data

STEPS = 8
"""Steps of one turn."""
ROUNDS, LEAST_ROUNDS, LIMIT_SECONDS = 9, 3, 45.0
"""Rounds of turns; on a slow machine fewer, once the limit has passed."""
TOLERANCE = 1e-4
"""Relative difference of losses and gradient norms up to which the two count as the same training."""

Steps = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


async def training_step(stage: Stage) -> list[Row]:
    """Tokens a second of both, measured in turns, after their losses and gradients were found equal."""
    await stage.clear()
    path = stage.llama("six-layers", vocab=VOCAB, hidden=256, layers=6, context=256)
    data = training_data()
    tokens = sum(len(datum) for datum in data)
    running = await stage.serve(path, "six", samplers=1)
    speeds: dict[str, list[float]] = {"ours": [], "same": [], "gathered": [], "arrival": []}
    async with connect(running.url) as client:
        model = await client.create_model("six", lora_rank=16)
        version = await model.publish("start")
        async with _bare(path, Path(version.event.result["path"])) as bare:
            _, ours = await _train(model, data, STEPS)
            _, theirs = await bare.run("same", STEPS)
            _compare(ours, theirs)
            await bare.run("arrival", STEPS)
            begun = time.monotonic()
            for turn in range(ROUNDS):
                if turn >= LEAST_ROUNDS and time.monotonic() - begun > LIMIT_SECONDS:
                    break
                # Each goes first as often as the others: what the one leaves in the caches the next one pays for.
                order = list(speeds)
                for who in order[turn % len(order) :] + order[: turn % len(order)]:
                    seconds, _ = await (_train(model, data, STEPS) if who == "ours" else bare.run(who, STEPS))
                    speeds[who].append(tokens * STEPS / seconds)
    await stage.clear()
    took = 1000 * tokens / median(speeds["ours"])
    first = f"a step of {took:.0f} ms; first losses {ours[0][0]:.4f} and {theirs[0][0]:.4f}"
    kept = "same packing, and the base's weights gathered once, as the service has them"
    return [
        faster_by("training_step", speeds["ours"], speeds["same"], 0.95, "tokens/s", f"same packing, {first}"),
        faster_by("training_step: gathered", speeds["ours"], speeds["gathered"], 0.95, "tokens/s", kept),
        faster_by("training_step: any", speeds["ours"], speeds["arrival"], 0.9, "tokens/s", "one padded batch a rank"),
    ]


async def _train(model: Model, data: list[Datum], steps: int) -> tuple[float, Steps]:
    """Seconds of so many steps, all enqueued ahead, and what they gave."""
    begun = time.perf_counter()
    sent = [(model.forward_backward(data, "cross_entropy"), model.optim_step(lr=LR, eps=1e-8)) for _ in range(steps)]
    results = [(await backward, await step) for backward, step in sent]
    seconds = time.perf_counter() - begun
    return seconds, [(b.metrics["loss:sum"], s.metrics["grad_norm"]) for b, s in results]


def _compare(ours: Steps, theirs: Steps) -> None:
    """Raise where the two did not train alike: a speed means nothing then."""
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for what, a, b in zip(("loss", "grad_norm"), mine, other, strict=True):
            if not abs(a - b) <= TOLERANCE * abs(b):
                raise TinsmithError(f"step {step}: {what} is {a!r} through the service, {b!r} in the bare loop")


class _Bare:
    """The processes of the bare loop, which wait between two turns."""

    def __init__(self, ranks: list[asyncio.subprocess.Process]) -> None:
        self._ranks = ranks

    async def run(self, packing: str, steps: int) -> tuple[float, Steps]:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{packing} {steps}\n".encode())
        answers: list[dict[str, Any]] = [json.loads(await _line(rank)) for rank in self._ranks]
        steps_done = list(zip(answers[0]["losses"], answers[0]["norms"], strict=True))
        return max(answer["seconds"] for answer in answers), steps_done


@asynccontextmanager
async def _bare(model: Path, adapter: Path) -> AsyncIterator[_Bare]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "tinsmith.ops.bench.compute.bare_loop",
                str(model),
                str(adapter),
                str(rank),
                str(port),
            ),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
        )
        for rank in range(WORLD)
    ]
    try:
        for rank in ranks:
            await _line(rank)
        yield _Bare(ranks)
    finally:
        for rank in ranks:
            if rank.returncode is None:
                rank.kill()
            await rank.wait()


async def _line(rank: asyncio.subprocess.Process) -> bytes:
    assert rank.stdout is not None
    line = await rank.stdout.readline()
    if not line:
        raise TinsmithError(f"a rank of the bare loop ended with code {await rank.wait()}")
    return line

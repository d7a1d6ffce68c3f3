"""`tinsmith bench`: what this machine makes of Tinsmith, each number beside its reference from the same run."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from importlib import import_module
from typing import Any

from rich.console import Console

from tinsmith.bus.protocol.errors import InvalidInput
from tinsmith.ops.bench.report import print_report
from tinsmith.ops.bench.row import Row
from tinsmith.ops.bench.stage import Stage

Benchmark = Callable[[Stage], Awaitable[list[Row]]]

BENCHMARKS = {
    "start": "upkeep",
    "idle": "upkeep",
    "memory": "upkeep",
    "empty_step": "doors.latency",
    "http_training": "doors.http_training",
    "http_submits": "doors.http_submits",
    "http_waiting": "doors.http_submits",
    "http_sampling": "doors.http_sampling",
    "http_crowd": "doors.http_sampling",
    "training_step": "compute.training",
    "packing": "compute.packing",
    "metrics": "compute.reduction",
    "logprob_memory": "compute.logprobs",
    "sampling": "compute.sampling",
}
"""Name -> module that holds it, in the order of a whole run: those that share a service stand together."""


def main(names: list[str]) -> int:
    """Run these benchmarks (none named: all) and print their rows; a missed target is reported, not an error.

    Raises InvalidInput for a name that is none, and the typed error of a service that can't start.
    """
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        raise InvalidInput(f"no benchmark is named {unknown[0]!r}", remedy=f"Choose from: {', '.join(BENCHMARKS)}.")
    # Read by torch, Ray and transformers when they are imported, here and in every process started from here.
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    chosen = [name for name in BENCHMARKS if name in names or not names]
    try:
        rows = asyncio.run(_until_signal(_run(chosen)))
    except asyncio.CancelledError:
        return 130
    print_report(rows, Console())
    return 0


_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
}


async def _until_signal(running: Coroutine[Any, Any, list[Row]]) -> list[Row]:
    """Await the run; SIGINT and SIGTERM cancel it, so that it stops its service before it ends."""
    task = asyncio.create_task(running)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await task


async def _run(names: list[str]) -> list[Row]:
    rows: list[Row] = []
    async with Stage(_say) as stage:
        for name in names:
            _say(f"measuring {name}")
            benchmark: Benchmark = getattr(import_module(f"tinsmith.ops.bench.{BENCHMARKS[name]}"), name)
            rows += await benchmark(stage)
    return rows


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

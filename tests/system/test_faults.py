"""Processes are killed while they work: every command takes effect once, with the numbers of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from batches import supervised
from serving import Service, processes_of, start_service

from tinsmith.api import Client, Model, connect

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def fragile(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service of this module's own, to be harmed."""
    running = start_service(tiny_model, tmp_path_factory.mktemp("fragile") / "state", "--alias", "tiny")
    yield running
    running.stop()
    assert processes_of(running.state) == []


@pytest.fixture
async def client(fragile: Service) -> AsyncIterator[Client]:
    async with connect(fragile.state) as client:
        yield client


def enqueue(model: Model, first: int, last: int) -> list[Any]:
    """Steps first..last-1, enqueued at once."""
    calls: list[Any] = []
    for number in range(first, last):
        calls.append(model.forward_backward(supervised(number), "cross_entropy"))
        calls.append(model.optim_step(lr=1e-2))
    return calls


async def train(model: Model, first: int, last: int) -> list[dict[str, float]]:
    """The metrics of steps first..last-1."""
    return [dict((await call).metrics) for call in enqueue(model, first, last)]


async def told(client: Client) -> dict[str, Any]:
    status = await client.status()
    assert status is not None
    return status


async def test_a_killed_rank_changes_no_weight(client: Client) -> None:
    still = await client.create_model("tiny", name="still", lora_rank=4)
    undisturbed = await train(still, 0, 8)
    model = await client.create_model("tiny", name="struck", lora_rank=4)
    metrics = await train(model, 0, 3)
    pids = (await told(client))["trainer"]["pids"]
    rest = enqueue(model, 3, 8)
    await rest[0]
    os.kill(pids[1], signal.SIGKILL)
    metrics += [dict((await call).metrics) for call in rest]
    assert metrics == undisturbed
    # The model that stood by was restored as well.
    probe = supervised(99)
    left, right = await still.forward(probe, "cross_entropy"), await model.forward(probe, "cross_entropy")
    assert left.metrics == right.metrics


async def test_a_killed_coordinator_loses_and_repeats_nothing(client: Client) -> None:
    still = await client.create_model("tiny", name="still2", lora_rank=4)
    undisturbed = await train(still, 0, 8)
    model = await client.create_model("tiny", name="struck2", lora_rank=4)
    pid = (await told(client))["pid"]
    work = enqueue(model, 0, 8)
    await work[0]
    os.kill(pid, signal.SIGKILL)
    assert [dict((await call).metrics) for call in work] == undisturbed
    assert (await model.info()).event.result["step"] == 8


async def test_a_killed_sampler_is_replaced_and_its_requests_are_answered(client: Client, fragile: Service) -> None:
    import psutil

    replicas = [p for p in psutil.process_iter(["name", "cmdline"]) if "ray::SamplerReplica" in " ".join(p.cmdline())]
    mine = [p for p in replicas if _session_of(p.pid) == _session_of((await told(client))["pid"])]
    calls = [client.sample([1, 2, 3], max_tokens=60, seed=n, stop=[]) for n in range(8)]
    expected = await asyncio.gather(*calls)
    calls = [client.sample([1, 2, 3], max_tokens=60, seed=n, stop=[]) for n in range(8)]
    await calls[0]
    mine[0].kill()
    got = await asyncio.gather(*calls)
    assert [s.sequences[0].tokens.tolist() for s in got] == [s.sequences[0].tokens.tolist() for s in expected]


def _session_of(pid: int) -> str:
    """The Ray session that a worker belongs to."""
    for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if line.startswith((b"RAY_JOB_ID", b"RAY_RAYLET_PID")):
            return line.decode()
    raise AssertionError(f"{pid} is no Ray worker")

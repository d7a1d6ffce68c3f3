"""Processes are killed while they work: every command takes effect once, with the numbers of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from batches import supervised
from serving import Service, processes_of, start_service

from tinsmith.api import Client, Model, connect
from tinsmith.bus.protocol.errors import LeaseHeld
from tinsmith.bus.redis.embedded import socket_path

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def fragile(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service of this module's own, to be harmed."""
    running = start_service(
        tiny_model, tmp_path_factory.mktemp("fragile") / "state", "--alias", "tiny", "--snapshot-steps", "3"
    )
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
    """The status as of now, not of a moment ago."""
    return await said(client, lambda status: True)


async def said(client: Client, wanted: Callable[[dict[str, Any]], bool], seconds: float = 60) -> dict[str, Any]:
    """The first status from now on that is as wanted; the service writes one every two seconds."""
    asked = time.time()
    async with asyncio.timeout(seconds):
        while True:
            status = await client.status()
            if status is not None and status["at"] >= asked and wanted(status):
                return status
            await asyncio.sleep(0.1)


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
    trainer = (await told(client))["trainer"]
    assert trainer["rebuilds"] == 1
    assert trainer["snapshots"] > 0
    assert trainer["replay_differs"] == 0
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


async def test_a_coordinator_that_slept_past_its_lease_goes_on_where_the_model_stands(client: Client) -> None:
    model = await client.create_model("tiny", name="slept", lora_rank=4)
    metrics = await train(model, 0, 2)
    pid = (await told(client))["pid"]
    os.kill(pid, signal.SIGSTOP)
    meta = await client._bus.meta("slept")
    # The clock of the bus decides; its lease is the only thing that can be waited for.
    epoch = await _own_when_free(client, "slept")
    assert epoch > int(meta["epoch"])
    await client._bus.release("slept", "another", epoch)
    work = enqueue(model, 2, 4)
    os.kill(pid, signal.SIGCONT)
    metrics += [dict((await call).metrics) for call in work]
    still = await client.create_model("tiny", name="awake", lora_rank=4)
    assert metrics == await train(still, 0, 4)


async def _own_when_free(client: Client, model: str) -> int:
    """Take a model as another coordinator would, once its lease has run out."""
    while True:
        try:
            return await client._bus.own(model, "another", 1000)
        except LeaseHeld:
            await asyncio.sleep(0.1)


async def test_a_killed_sampler_is_replaced_and_its_requests_are_answered(client: Client) -> None:
    calls = [client.sample([1, 2, 3], max_tokens=60, seed=n, stop=[]) for n in range(8)]
    expected = await asyncio.gather(*calls)
    before = (await told(client))["sampler"]
    calls = [client.sample([1, 2, 3], max_tokens=60, seed=n, stop=[]) for n in range(8)]
    await asyncio.sleep(0)
    os.kill(before["pids"][0], signal.SIGKILL)
    got = await asyncio.gather(*calls)
    assert [s.sequences[0].tokens.tolist() for s in got] == [s.sequences[0].tokens.tolist() for s in expected]


async def test_a_sampler_that_dies_while_nothing_is_asked_is_replaced_at_once(client: Client) -> None:
    before = (await told(client))["sampler"]
    os.kill(before["pids"][0], signal.SIGKILL)
    after = (await said(client, lambda status: status["sampler"]["pids"] != before["pids"]))["sampler"]
    assert after["replicas_lost"] == before["replicas_lost"] + 1
    assert (await client.sample([1], max_tokens=1)).sequences


async def test_a_stream_whose_sampler_is_killed_goes_on_and_tells_no_token_twice(client: Client) -> None:
    asked: dict[str, Any] = {"n": 4, "max_tokens": 200, "stop": []}
    before = (await told(client))["sampler"]
    tokens: dict[int, list[int]] = {index: [] for index in range(4)}
    async for part in client.stream([1, 2, 3], **asked):
        assert part.at == len(tokens[part.index])
        tokens[part.index] += part.tokens
        if part.index == 0 and part.at == 10:
            os.kill(before["pids"][0], signal.SIGKILL)
    assert [len(of_one) for of_one in tokens.values()] == [200] * 4
    assert (await told(client))["sampler"]["replicas_lost"] == before["replicas_lost"] + 1


async def test_a_killed_bus_server_comes_back_with_every_accepted_command(client: Client, fragile: Service) -> None:
    still = await client.create_model("tiny", name="still4", lora_rank=4)
    undisturbed = await train(still, 0, 6)
    model = await client.create_model("tiny", name="struck4", lora_rank=4)
    work = enqueue(model, 0, 6)
    await work[0]
    os.kill(_server_pid(fragile.state), signal.SIGKILL)
    assert [dict((await call).metrics) for call in work] == undisturbed


def _server_pid(state: Path) -> int:
    """The process of the embedded server on `state`."""
    with redis.Redis(unix_socket_path=str(socket_path(state.resolve()))) as server:
        return int(server.info("server")["process_id"])

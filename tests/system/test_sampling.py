"""Samples as they come, and samples that are wanted no more."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest
from batches import supervised
from serving import Service

from tinsmith.api import Client, connect
from tinsmith.bus.protocol import errors
from tinsmith.bus.protocol.envelope import LANES, Command, Kind, new_id

LONG: dict[str, Any] = {"n": 256, "max_tokens": 240, "stop": []}
"""Thousands of steps of the sampler."""


@pytest.fixture
async def client(service: Service) -> AsyncIterator[Client]:
    async with connect(service.state) as client:
        yield client


async def test_a_stream_gives_the_tokens_of_the_whole_sample_as_they_come(client: Client) -> None:
    asked: dict[str, Any] = {"n": 2, "max_tokens": 30, "seed": 5, "stop": []}
    whole = await client.sample([3, 4, 5], **asked)
    parts = [part async for part in client.stream([3, 4, 5], **asked)]
    for index, sequence in enumerate(whole.sequences):
        mine = [part for part in parts if part.index == index]
        assert [part.at for part in mine] == list(range(30))
        assert [token for part in mine for token in part.tokens] == sequence.tokens.tolist()
        assert mine[-1].stop_reason == sequence.stop_reason == "length"


async def test_a_wrong_stream_is_refused(client: Client) -> None:
    with pytest.raises(errors.InvalidInput, match="temperature"):
        await anext(client.stream([3], temperature=-1.0))
    with pytest.raises(errors.UnknownVersion):
        await anext(client.stream([3], version="nobody/v1"))


async def test_leaving_a_stream_frees_its_place(client: Client) -> None:
    stream = client.stream([3, 4], **LONG)
    first = await anext(stream)
    assert first.at == 0
    await stream.aclose()
    async with asyncio.timeout(30):
        async for seen in client.events(["@control"], since="0"):
            if seen.event.result.get("cancelled"):
                break
    assert (await client.sample([3], max_tokens=2)).sequences


async def test_a_cancelled_sample_fails_as_cancelled_also_where_it_still_waits(client: Client) -> None:
    """Two that fill every row more than once, and one that had ended."""
    ended = client.sample([7], max_tokens=1)
    await ended
    running, waiting = client.sample([3], **LONG), client.sample([4], **LONG)
    assert await client.cancel(waiting)
    assert await client.cancel(running)
    for call in (running, waiting):
        with pytest.raises(errors.Cancelled):
            await call
    assert not await client.cancel(ended)
    assert not await client.cancel(running)
    assert (await ended).sequences


async def test_only_samples_that_exist_can_be_cancelled(client: Client) -> None:
    with pytest.raises(errors.UnknownCommand):
        await client.cancel("no-such-command")
    model = await client.create_model("tiny", lora_rank=2)
    backward = model.forward_backward(supervised(1), "cross_entropy")
    await backward
    with pytest.raises(errors.InvalidInput, match="Only samples"):
        await client.cancel(backward)  # type: ignore[arg-type]
    await model.unload()


async def test_a_name_that_is_published_again_after_its_deletion_gives_the_new_weights(
    client: Client, service: Service
) -> None:
    model = await client.create_model("tiny", name="again", lora_rank=4)

    async def said() -> list[float]:
        return list((await client.sample([3, 4], version="again/v", max_tokens=4, seed=1)).sequences[0].logprobs)

    await model.publish("v")
    before = await said()
    model.forward_backward(supervised(1), "cross_entropy")
    await model.optim_step(lr=0.1)
    shutil.rmtree(service.state / "published" / "again" / "v")
    with pytest.raises(errors.UnknownVersion):
        await said()
    await model.publish("v")
    assert await said() != before
    await model.unload()


@pytest.mark.parametrize("lane", sorted(LANES))
async def test_a_lane_refuses_what_is_not_its_own(client: Client, lane: str) -> None:
    event, _ = await client._inbox.call(Command(id=new_id(), model=lane, kind=Kind.INFO, seq=-1), deadline=30)
    assert event.error is not None
    assert event.error["code"] == "invalid_input"

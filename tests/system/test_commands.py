"""What a user gets from each command of a running service."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from batches import rollouts, supervised
from serving import CONTEXT, VOCAB, Service, run_cli

from tinsmith.api import Client, Datum, Model, TinsmithError, connect
from tinsmith.bus.protocol import errors
from tinsmith.bus.protocol.codec import encode
from tinsmith.bus.protocol.commands import SampleArgs
from tinsmith.bus.protocol.envelope import SAMPLE_LANE, Command, Kind, new_id

_numbers = itertools.count()


@pytest.fixture
async def client(service: Service) -> AsyncIterator[Client]:
    async with connect(service.state) as client:
        yield client


@pytest.fixture
async def model(client: Client) -> Model:
    return await client.create_model("tiny", name=f"m{next(_numbers)}", lora_rank=4)


async def test_forward_gives_the_metrics_of_forward_backward_and_no_gradient(model: Model) -> None:
    data = rollouts(1)
    forward = await model.forward(data, "ppo")
    backward = await model.forward_backward(data, "ppo")
    again = await model.forward(data, "ppo")
    assert forward.metrics == backward.metrics == again.metrics
    for key in ("total_loss:sum", "pg_loss:sum", "entropy_loss:sum", "num_tokens:sum"):
        assert key in forward.metrics
    assert forward.metrics["num_tokens:sum"] == sum(np.count_nonzero(d.inputs["advantages"]) for d in data)
    assert [len(array) for array in forward.logprobs] == [len(d.tokens) for d in data]


async def test_a_step_without_a_backward_is_refused_after_forward_alone(model: Model) -> None:
    await model.forward(supervised(1), "cross_entropy")
    with pytest.raises(errors.NoGradients):
        await model.optim_step(lr=1e-3)


async def test_optim_step_reports_what_it_used_and_lowers_the_loss(model: Model) -> None:
    data = supervised(2)
    first = model.forward_backward(data, "cross_entropy")
    step = model.optim_step(lr=3e-2)
    after = model.forward(data, "cross_entropy")
    assert (await step).metrics["learning_rate"] == 3e-2
    assert (await step).metrics["grad_norm"] > 0
    assert (await after).metrics["loss:sum"] < (await first).metrics["loss:sum"]


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo"])
async def test_each_loss_trains_and_publishes_one_reduction_per_key(model: Model, loss: str) -> None:
    data = supervised(3) if loss == "cross_entropy" else rollouts(3)
    metrics = (await model.forward_backward(data, loss)).metrics
    assert all(key.count(":") == 1 for key in metrics)
    assert ("pg_loss:sum" in metrics) == (loss != "cross_entropy")


async def test_full_fine_tuning_trains_every_weight(client: Client) -> None:
    model = await client.create_model("tiny", name=f"full{next(_numbers)}")
    data = supervised(4)
    before = (await model.forward(data, "cross_entropy")).metrics["loss:sum"]
    await model.forward_backward(data, "cross_entropy")
    await model.optim_step(lr=1e-2)
    assert (await model.forward(data, "cross_entropy")).metrics["loss:sum"] < before
    version = await model.publish("v1")
    sampled = await client.sample([1, 2, 3], version=version, max_tokens=3, temperature=0.0)
    assert len(sampled.sequences[0].tokens) == 3
    await model.unload()


async def test_samples_have_the_log_probs_that_the_trainer_finds(client: Client, model: Model) -> None:
    await model.forward_backward(supervised(5), "cross_entropy")
    await model.optim_step(lr=3e-2)
    version = await model.publish("v1")
    sampled = await client.sample([5, 6, 7], version=version, n=2, max_tokens=6, seed=3, stop=[])
    for sequence in sampled.sequences:
        tokens = np.concatenate([[5, 6, 7], sequence.tokens])
        found = await model.forward([Datum(tokens[:-1], {"target_tokens": tokens[1:]})], "cross_entropy")
        np.testing.assert_allclose(found.logprobs[0][2:], sequence.logprobs, atol=1e-4)


async def test_a_published_version_never_changes(client: Client, model: Model) -> None:
    version = await model.publish("v1")
    ask: dict[str, Any] = {"version": version, "max_tokens": 8, "temperature": 0.0, "stop": []}
    before = await client.sample([9, 8, 7], **ask)
    await model.forward_backward(supervised(6), "cross_entropy")
    await model.optim_step(lr=0.1)
    newer = await model.publish("v2")
    after = await client.sample([9, 8, 7], **ask)
    np.testing.assert_array_equal(before.sequences[0].tokens, after.sequences[0].tokens)
    np.testing.assert_allclose(before.sequences[0].logprobs, after.sequences[0].logprobs, atol=1e-5)
    trained = await client.sample([9, 8, 7], **{**ask, "version": newer})
    assert not np.allclose(trained.sequences[0].logprobs[0], after.sequences[0].logprobs[0], atol=1e-3)
    with pytest.raises(errors.VersionExists):
        await model.publish("v1")


async def test_a_seed_repeats_samples_and_tells_them_apart(client: Client) -> None:
    first = await client.sample([3, 4], n=4, max_tokens=6, seed=11, stop=[])
    again = await client.sample([3, 4], n=4, max_tokens=6, seed=11, stop=[])
    rows = [tuple(s.tokens.tolist()) for s in first.sequences]
    assert rows == [tuple(s.tokens.tolist()) for s in again.sequences]
    assert len(set(rows)) > 1


async def test_a_checkpoint_restores_weights_and_optimizer_bit_for_bit(client: Client, model: Model) -> None:
    await model.forward_backward(supervised(7), "cross_entropy")
    await model.optim_step(lr=1e-2)
    saved = await model.save("c1")
    straight = [(await model.forward_backward(supervised(8), "cross_entropy")).metrics]
    straight.append((await model.optim_step(lr=1e-2)).metrics)
    straight.append((await model.forward(supervised(8), "cross_entropy")).metrics)
    other = await client.create_model("tiny", name=f"m{next(_numbers)}", lora_rank=4, seed=5)
    await other.load(saved, optimizer=True)
    resumed = [(await other.forward_backward(supervised(8), "cross_entropy")).metrics]
    resumed.append((await other.optim_step(lr=1e-2)).metrics)
    resumed.append((await other.forward(supervised(8), "cross_entropy")).metrics)
    assert resumed == straight
    await other.load(saved)
    await other.forward_backward(supervised(8), "cross_entropy")
    assert (await other.optim_step(lr=1e-2)).metrics["step"] == 1


async def test_an_unloaded_model_is_unknown_and_its_name_is_free(client: Client, model: Model) -> None:
    await model.unload()
    with pytest.raises(errors.UnknownModel):
        await model.forward(supervised(1), "cross_entropy")
    fresh = await client.create_model("tiny", name=model.name, lora_rank=2)
    assert (await fresh.info()).event.result["lora"]["rank"] == 2


async def test_what_was_sent_behind_an_unload_is_refused_and_harms_nothing(client: Client, model: Model) -> None:
    before = (await client.status() or {})["pid"]
    calls = [model.forward_backward(supervised(1), "cross_entropy"), model.unload()]
    late = [model.forward(supervised(1), "cross_entropy"), model.optim_step(lr=1e-3), model.info()]
    assert [(await call).event.ok for call in calls] == [True, True]
    for call in late:
        with pytest.raises(errors.UnknownModel):
            await call
    other = await client.create_model("tiny", name=model.name, lora_rank=4)
    assert (await other.info()).event.ok
    assert (await client.status() or {})["pid"] == before


async def test_calls_are_carried_out_in_the_order_of_the_calls(model: Model) -> None:
    calls = []
    for number in range(5):
        calls.append(model.forward_backward(supervised(number), "cross_entropy"))
        calls.append(model.optim_step(lr=1e-3))
    seqs = [(await call).event.seq for call in calls]
    assert seqs == sorted(seqs)
    assert (await calls[-1]).metrics["step"] == 5


def bad_batches() -> dict[str, tuple[type[TinsmithError], dict[str, Any], int | None, str | None]]:
    """name -> (error, arguments of forward_backward, datum, field)."""
    good = supervised(1)

    def with_inputs(**changes: Any) -> list[Datum]:
        inputs = {**good[1].inputs, **changes}
        kept = {name: value for name, value in inputs.items() if value is not None}
        return [good[0], Datum(good[1].tokens, kept)]

    n = len(good[1].tokens)
    ce: dict[str, Any] = {"loss": "cross_entropy"}
    nan = np.where(np.arange(n) == 3, np.nan, 1.0)
    out = np.array([1, VOCAB, 2])
    long = [1] * (CONTEXT + 1)
    return {
        "unknown loss": (errors.UnknownLoss, {"data": good, "loss": "nope"}, None, "loss"),
        "unknown config key": (errors.InvalidLossConfig, {"data": good, **ce, "config": {"x": 1}}, None, "x"),
        "mistyped config": (
            errors.InvalidLossConfig,
            {"data": rollouts(1), "loss": "ppo", "config": {"clip_low_threshold": "low"}},
            None,
            "clip_low_threshold",
        ),
        "missing input": (errors.InvalidDatum, {"data": good, "loss": "ppo"}, 0, "logprobs"),
        "missing target": (errors.InvalidDatum, {"data": with_inputs(target_tokens=None), **ce}, 1, "target_tokens"),
        "unequal lengths": (errors.InvalidDatum, {"data": with_inputs(weights=np.ones(n - 1)), **ce}, 1, "weights"),
        "NaN": (errors.InvalidDatum, {"data": with_inputs(weights=nan), **ce}, 1, "weights"),
        "empty batch": (errors.InvalidInput, {"data": [], **ce}, None, "lengths"),
        "empty sequence": (
            errors.InvalidDatum,
            {"data": [good[0], Datum([], {"target_tokens": [], "weights": []})], **ce},
            1,
            None,
        ),
        "token out of vocabulary": (
            errors.InvalidDatum,
            {"data": [good[0], Datum(out, {"target_tokens": [1, 2, 3], "weights": [1, 1, 1]})], **ce},
            1,
            "tokens",
        ),
        "target out of vocabulary": (
            errors.InvalidDatum,
            {"data": [good[0], Datum([1, 2, 3], {"target_tokens": out, "weights": [1, 1, 1]})], **ce},
            1,
            "target_tokens",
        ),
        "over the context": (
            errors.SequenceTooLong,
            {"data": [good[0], Datum(long, {"target_tokens": long, "weights": long})], **ce},
            1,
            "tokens",
        ),
    }


@pytest.mark.parametrize("name", bad_batches())
async def test_a_bad_batch_is_a_typed_error_for_its_caller_and_in_the_events_and_harms_nothing(
    client: Client, model: Model, name: str
) -> None:
    error, arguments, datum, field = bad_batches()[name]
    await model.forward_backward(supervised(1), "cross_entropy")
    bad = model.forward_backward(**arguments)
    with pytest.raises(error) as caught:
        await bad
    assert type(caught.value) is error
    assert caught.value.model == model.name
    assert caught.value.command == bad.command.id
    assert caught.value.datum == datum
    assert field is None or caught.value.field == field
    assert caught.value.remedy
    async for seen in client.events([model.name], since="0"):
        if isinstance(seen, errors.Gap):
            raise seen
        if seen.event.id == bad.command.id:
            assert not seen.event.ok
            assert TinsmithError.from_wire(seen.event.error or {}).to_wire() == caught.value.to_wire()
            break
    # The gradient of the good batch is still there, and only that.
    step = await model.optim_step(lr=1e-3)
    alone = await client.create_model("tiny", name=f"m{next(_numbers)}", lora_rank=4)
    await alone.forward_backward(supervised(1), "cross_entropy")
    assert step.metrics == (await alone.optim_step(lr=1e-3)).metrics


async def test_wrong_arguments_are_typed_errors_that_name_the_field(client: Client, model: Model) -> None:
    with pytest.raises(errors.InvalidInput) as negative:
        await model.optim_step(lr=-1.0)
    assert negative.value.field == "lr"
    with pytest.raises(errors.InvalidInput) as unknown:
        await model.optim_step(lr=1.0, momentum=0.9)
    assert unknown.value.field == "momentum"
    with pytest.raises(errors.UnknownModel) as nobody:
        await client.model("nobody").info()
    assert nobody.value.model == "nobody"
    with pytest.raises(errors.InvalidInput) as base:
        await client.create_model("another-base", name=f"m{next(_numbers)}", lora_rank=4)
    assert base.value.field == "base"
    with pytest.raises(errors.ModelExists):
        await client.create_model("tiny", name=model.name, lora_rank=4)
    with pytest.raises(errors.UnknownVersion):
        await model.load("nobody/c1")
    with pytest.raises(errors.UnknownVersion):
        await client.sample([1, 2], version="nobody/v1")
    with pytest.raises(errors.SequenceTooLong):
        await client.sample([1, 2], max_tokens=CONTEXT)
    with pytest.raises(errors.InvalidInput):
        await client.sample([VOCAB + 1], max_tokens=2)


async def test_arguments_that_a_foreign_program_gets_wrong_are_refused_by_the_service_itself(
    client: Client, model: Model
) -> None:
    async with client._bus.inbox() as inbox:
        for kind, args in ((Kind.OPTIM_STEP, {"lr": -1.0}), (Kind.FORWARD, {"loss": "ppo", "extra": 1})):
            command = Command(id=new_id(), model=model.name, kind=kind, seq=-1, args=args)
            event, _ = await inbox.call(command, b"", deadline=30.0)
            assert event.error is not None
            assert event.error["code"] == "invalid_input"
        body = encode({"prompt": np.array([1, 2], dtype=np.int32)})
        wrong = {**SampleArgs().model_dump(), "temperature": -1.0}
        command = Command(id=new_id(), model=SAMPLE_LANE, kind=Kind.SAMPLE, seq=-1, args=wrong)
        event, _ = await inbox.call(command, body, deadline=30.0)
        assert event.error is not None
        assert event.error["field"] == "temperature"
    assert (await model.info()).event.ok


def test_status_and_watch_tell_what_happened(service: Service) -> None:
    told = run_cli("status", "--url", str(service.state))
    assert told.returncode == 0
    assert "phase: ready" in told.stdout
    seen = run_cli("watch", "--url", str(service.state), "--since", "0", "--count", "3")
    assert seen.returncode == 0
    assert len(seen.stdout.splitlines()) == 3

"""What a rank does with commands: accumulate, step, refuse, without one model touching another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import run_ranks
from tiny import batch
from torch.distributed.device_mesh import DeviceMesh

from tinsmith.actors.engine.engine import Engine, ForwardResult
from tinsmith.actors.engine.losses.contract import Config, Loss, LossOutput, TokenInputs
from tinsmith.actors.engine.losses.registry import LossRegistry
from tinsmith.actors.engine.trainable.trainable import gather_shards
from tinsmith.bus.protocol.commands import CreateModelArgs, ForwardArgs, LoraSpec, OptimStepArgs
from tinsmith.bus.protocol.datum import Datum
from tinsmith.bus.protocol.errors import (
    CommandFailed,
    InvalidDatum,
    InvalidInput,
    ModelExists,
    NoGradients,
    NonFinite,
    UnknownLoss,
    UnknownModel,
)

LORA = CreateModelArgs(base="tiny", lora=LoraSpec(rank=4, seed=1))
FULL = CreateModelArgs(base="tiny")
BOTH = pytest.mark.parametrize("args", [LORA, FULL], ids=["lora", "full"])
STEP = OptimStepArgs(lr=1e-2, eps=1e-5)
CE = ForwardArgs(loss="cross_entropy")


def engine_of(path: Path, mesh: DeviceMesh | None = None, **options: Any) -> Engine:
    torch.set_num_threads(1)
    return Engine(path, alias="tiny", mesh=mesh, token_budget=48, **options)


def run(engine: Engine, model: str, data: list[Datum], *, backward: bool = True) -> ForwardResult:
    return engine.forward(model, data, engine.plan(data), CE, backward=backward)


def state(engine: Engine, model: str) -> dict[str, np.ndarray]:
    return {n: gather_shards(p.detach()).numpy().copy() for n, p in engine._models[model].params.items()}


def grads(engine: Engine, model: str) -> dict[str, np.ndarray | None]:
    params = engine._models[model].params
    return {n: None if p.grad is None else gather_shards(p.grad).numpy().copy() for n, p in params.items()}


def assert_equal(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


@BOTH
def test_chunks_then_a_step_equal_one_batch_then_a_step(llama: Path, args: CreateModelArgs) -> None:
    whole, parts = engine_of(llama), engine_of(llama)
    data = batch(9)
    for engine in (whole, parts):
        engine.create("m", args)
    run(whole, "m", data)
    for start in range(0, 9, 3):
        run(parts, "m", data[start : start + 3])
    one, three = whole.optim_step("m", STEP), parts.optim_step("m", STEP)
    assert three["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    for name, value in state(whole, "m").items():
        np.testing.assert_allclose(state(parts, "m")[name], value, rtol=1e-5, atol=1e-5)


@BOTH
def test_forward_gives_the_same_result_and_leaves_gradients_alone(llama: Path, args: CreateModelArgs) -> None:
    engine = engine_of(llama)
    engine.create("m", args)
    run(engine, "m", batch(3, seed=1))
    before = grads(engine, "m")
    scored = run(engine, "m", batch(5), backward=False)
    assert_equal(grads(engine, "m"), before)
    trained = run(engine, "m", batch(5))
    assert_equal(scored.columns, trained.columns)
    for left, right in zip(scored.logprobs, trained.logprobs, strict=True):
        np.testing.assert_array_equal(left, right)


def fewer_datums_than_ranks(mesh: DeviceMesh, path: Path, args: CreateModelArgs) -> Any:
    engine = engine_of(path, mesh)
    engine.create("m", args)
    result = run(engine, "m", batch(1))
    return result.indices.tolist(), engine.optim_step("m", STEP), state(engine, "m")


@BOTH
def test_fewer_datums_than_ranks_give_the_same_step(llama: Path, args: CreateModelArgs) -> None:
    alone = engine_of(llama)
    alone.create("m", args)
    run(alone, "m", batch(1))
    columns = alone.optim_step("m", STEP)
    results = run_ranks(3, fewer_datums_than_ranks, llama, args)
    assert sorted(len(r[0]) for r in results) == [0, 0, 1]
    for _, got, weights in results:
        assert got == pytest.approx(columns, rel=1e-5)
        for name, value in state(alone, "m").items():
            np.testing.assert_allclose(weights[name], value, rtol=1e-5, atol=1e-5)


def test_what_other_models_do_changes_no_bit(llama: Path) -> None:
    quiet, busy = engine_of(llama), engine_of(llama)
    quiet.create("m", LORA)
    busy.create("x", CreateModelArgs(base="tiny", lora=LoraSpec(rank=2, seed=9, unembed=True)))
    busy.create("m", LORA)
    for step in range(3):
        run(busy, "x", batch(4, seed=50 + step))
        run(quiet, "m", batch(5, seed=step))
        run(busy, "m", batch(5, seed=step))
        busy.optim_step("x", OptimStepArgs(lr=0.1))
        if step == 1:
            busy.unload("x")
            busy.create("x", FULL)
        assert quiet.optim_step("m", STEP) == busy.optim_step("m", STEP)
    assert_equal(state(quiet, "m"), state(busy, "m"))


def test_recomputing_activations_changes_no_bit(llama: Path) -> None:
    results = []
    for recompute in (False, True):
        engine = engine_of(llama, gradient_checkpointing=recompute)
        engine.create("m", LORA)
        result = run(engine, "m", batch(6))
        results.append((result.columns, grads(engine, "m")))
    assert_equal(results[0][0], results[1][0])
    assert_equal(results[0][1], results[1][1])


@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "mixtral", "qwen3_moe", "llama-tied"])
def test_other_architectures_train(model_of: Callable[[str], Path], kind: str) -> None:
    engine = engine_of(model_of(kind))
    lora = LoraSpec(rank=2, mlp="mo" not in kind and kind != "mixtral", unembed=True)
    for name, args in (("lora", CreateModelArgs(base="tiny", lora=lora)), ("full", FULL)):
        engine.create(name, args)
        losses = []
        for _ in range(3):
            losses.append(run(engine, name, batch(4)).columns["loss"].sum())
            engine.optim_step(name, STEP)
        assert losses[2] < losses[0]


def test_a_command_that_can_not_be_done_is_refused_before_anything_changed(llama: Path) -> None:
    engine = engine_of(llama)
    engine.create("m", LORA)
    run(engine, "m", batch(3))
    before = grads(engine, "m")
    data = batch(3)
    plan = engine.plan(data)
    wrong = [*data[:2], Datum([999], {"target_tokens": [1], "weights": [1.0]})]
    with pytest.raises(InvalidDatum) as caught:
        engine.forward("m", wrong, engine.plan(wrong), CE, backward=True)
    assert caught.value.datum == 2
    with pytest.raises(UnknownLoss):
        engine.forward("m", data, plan, ForwardArgs(loss="nope"), backward=True)
    with pytest.raises(UnknownModel, match="loaded are: m"):
        engine.forward("x", data, plan, CE, backward=True)
    with pytest.raises(ModelExists):
        engine.create("m", FULL)
    with pytest.raises(InvalidInput, match="'other'"):
        engine.create("n", CreateModelArgs(base="other"))
    assert engine.models() == ["m"]
    assert_equal(grads(engine, "m"), before)


def test_a_step_needs_gradients(llama: Path) -> None:
    engine = engine_of(llama)
    engine.create("m", LORA)
    with pytest.raises(NoGradients, match="'m'"):
        engine.optim_step("m", STEP)
    run(engine, "m", batch(3), backward=False)
    with pytest.raises(NoGradients):
        engine.optim_step("m", STEP)


@BOTH
def test_a_non_finite_gradient_changes_nothing_and_the_model_goes_on(llama: Path, args: CreateModelArgs) -> None:
    engine = engine_of(llama)
    engine.create("m", args)
    before = state(engine, "m")
    run(engine, "m", batch(3))
    next(p for p in engine._models["m"].params.values() if p.grad is not None).grad[0, 0] = float("nan")
    with pytest.raises(NonFinite):
        engine.optim_step("m", STEP)
    assert_equal(state(engine, "m"), before)
    run(engine, "m", batch(3))
    assert engine.optim_step("m", STEP)["step"] == 1


def _breaks_on_long_rows(tokens: TokenInputs, config: Config) -> LossOutput:
    if int(tokens.mask.sum(-1).max()) > 12:
        raise ZeroDivisionError("a bug of the loss")
    return LossOutput(torch.where(tokens.mask, -tokens.logprobs, 0.0), tokens.mask)


def failing_loss(mesh: DeviceMesh, path: Path, args: CreateModelArgs) -> Any:
    losses = LossRegistry.builtin()
    losses.register(Loss("breaks", _breaks_on_long_rows))
    engine = Engine(path, alias="tiny", mesh=mesh, token_budget=16, losses=losses)
    engine.create("m", args)
    data = batch(3)
    run(engine, "m", data)
    before = grads(engine, "m")
    plain = [Datum(d.tokens, {"target_tokens": d.inputs["target_tokens"]}) for d in batch(5)]
    with pytest.raises(CommandFailed, match="a bug of the loss"):
        engine.forward("m", plain, engine.plan(plain), ForwardArgs(loss="breaks"), backward=True)
    assert_equal(grads(engine, "m"), before)
    return engine.optim_step("m", STEP)


@BOTH
def test_a_loss_that_fails_on_one_rank_fails_on_all_and_changes_nothing(llama: Path, args: CreateModelArgs) -> None:
    left, right = run_ranks(2, failing_loss, llama, args)
    assert left == right

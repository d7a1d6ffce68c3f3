"""The same numbers at 1, 2 and 3 ranks, and one rank's trouble is every rank's error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gloo_ranks import run_ranks
from tiny import batch
from torch.distributed.device_mesh import DeviceMesh

from tinsmith.actors.engine.engine import Engine
from tinsmith.actors.engine.trainable.trainable import gather_shards
from tinsmith.bus.protocol.commands import CreateModelArgs, ForwardArgs, LoraSpec, OptimStepArgs

STEP = OptimStepArgs(lr=1e-2, grad_clip_norm=1.0, eps=1e-5, weight_decay=0.1)


def weights(engine: Engine, model: str) -> dict[str, np.ndarray]:
    """Every trainable parameter, whole."""
    return {n: gather_shards(p.detach()).cpu().numpy().copy() for n, p in engine._models[model].params.items()}


def train(
    mesh: DeviceMesh | None,
    path: Path,
    spec: LoraSpec | None,
    loss: str = "cross_entropy",
    count: int = 7,
    steps: int = 2,
    budget: int = 40,
    **options: Any,
) -> dict[str, Any]:
    """Two steps; everything they gave, with datums in the order of the batch."""
    engine = Engine(path, alias="tiny", mesh=mesh, token_budget=budget, **options)
    engine.create("m", CreateModelArgs(base="tiny", lora=spec))
    out: dict[str, Any] = {"columns": [], "logprobs": [], "steps": []}
    for step in range(steps):
        data = batch(count, loss=loss, seed=step)
        result = engine.forward("m", data, engine.plan(data), ForwardArgs(loss=loss), backward=True)
        out["columns"].append((result.indices, result.columns))
        out["logprobs"].append(dict(zip(result.indices.tolist(), result.logprobs, strict=True)))
        out["steps"].append(engine.optim_step("m", STEP))
    out["weights"] = weights(engine, "m")
    return out


def merged(results: list[dict[str, Any]], step: int, count: int) -> dict[str, np.ndarray]:
    """Columns of all ranks in datum order."""
    columns = {}
    for name in results[0]["columns"][step][1]:
        rows = np.full(count, np.nan)
        for result in results:
            indices, values = result["columns"][step]
            rows[indices] = values[name]
        columns[name] = rows
    return columns


@pytest.mark.parametrize("spec", [LoraSpec(rank=4, seed=3), None], ids=["lora", "full"])
@pytest.mark.parametrize("loss", ["cross_entropy", "ppo"])
def test_metrics_logprobs_and_weights_are_the_same_at_1_2_and_3_ranks(
    llama: Path, spec: LoraSpec | None, loss: str
) -> None:
    alone = [train(None, llama, spec, loss)]
    for world in (1, 2, 3) if loss == "cross_entropy" else (2,):
        results = run_ranks(world, train, llama, spec, loss)
        for step in range(2):
            expected, got = merged(alone, step, 7), merged(results, step, 7)
            for name in expected:
                np.testing.assert_allclose(got[name], expected[name], rtol=2e-5, atol=1e-5, err_msg=name)
            for result in results:
                for key, value in alone[0]["steps"][step].items():
                    assert result["steps"][step][key] == pytest.approx(value, rel=1e-5), key
            together = {i: lp for r in results for i, lp in r["logprobs"][step].items()}
            for index, logprobs in alone[0]["logprobs"][step].items():
                np.testing.assert_allclose(together[index], logprobs, rtol=1e-5, atol=1e-5)
        for result in results:
            for name, value in alone[0]["weights"].items():
                np.testing.assert_allclose(result["weights"][name], value, rtol=1e-5, atol=1e-5, err_msg=name)
                np.testing.assert_array_equal(result["weights"][name], results[0]["weights"][name])


@pytest.mark.parametrize("spec", [LoraSpec(rank=4, seed=3), None], ids=["lora", "full"])
def test_when_weights_are_freed_and_what_is_recomputed_changes_no_bit(llama: Path, spec: LoraSpec | None) -> None:
    expected = run_ranks(2, train, llama, spec)[0]["weights"]
    for options in (
        {"reshard": "after_forward"},
        {"reshard": "never"},
        {"reshard": "after_forward", "gradient_checkpointing": True},
        {"keep_gathered": 1 << 30},
        {"keep_gathered": 1 << 10},
    ):
        got = run_ranks(2, train_with, llama, spec, options)
        for name, value in expected.items():
            np.testing.assert_array_equal(got[0]["weights"][name], value, err_msg=f"{options} {name}")


def train_with(mesh: DeviceMesh, path: Path, spec: LoraSpec | None, options: dict[str, Any]) -> dict[str, Any]:
    return train(mesh, path, spec, **options)


def interleaved(mesh: DeviceMesh | None, path: Path, spec: LoraSpec | None, busy: bool) -> list[dict[str, np.ndarray]]:
    """One model's log-probs and weights while, if busy, others come, train, score and go."""
    engine = Engine(path, alias="tiny", mesh=mesh, token_budget=40, keep_gathered=1 << 30)
    engine.create("m", CreateModelArgs(base="tiny", lora=spec))
    out = []
    for step in range(3):
        data = batch(5, seed=step)
        plan = engine.plan(data)
        args = ForwardArgs(loss="cross_entropy")
        engine.forward("m", data, plan, args, backward=True)
        if busy:
            other = CreateModelArgs(base="tiny", lora=None if step == 1 else LoraSpec(rank=2, unembed=True))
            engine.create(f"x{step}", other)
            engine.forward(f"x{step}", data, plan, args, backward=True)
            engine.forward("m", data, plan, args, backward=False)
            engine.optim_step(f"x{step}", OptimStepArgs(lr=0.1))
            if step:
                engine.unload(f"x{step - 1}")
        engine.optim_step("m", STEP)
        scored = engine.forward("m", data, plan, args, backward=False)
        out.append({str(i): lp for i, lp in zip(scored.indices, scored.logprobs, strict=True)} | weights(engine, "m"))
    return out


@pytest.mark.parametrize("spec", [LoraSpec(rank=4, seed=3), None], ids=["lora", "full"])
def test_what_other_models_do_on_the_same_ranks_changes_no_bit(llama: Path, spec: LoraSpec | None) -> None:
    quiet = run_ranks(2, interleaved, llama, spec, False)
    busy = run_ranks(2, interleaved, llama, spec, True)
    for before, after in zip(quiet, busy, strict=True):
        for left, right in zip(before, after, strict=True):
            assert left.keys() == right.keys()
            for name in left:
                np.testing.assert_array_equal(left[name], right[name], err_msg=name)

"""Checkpoints resume to the bit, published weights are what other programs load, damage is found."""

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

from tinsmith.actors.engine import checkpoint
from tinsmith.actors.engine.engine import Engine
from tinsmith.actors.engine.trainable.trainable import gather_shards
from tinsmith.bus.protocol.commands import CreateModelArgs, ForwardArgs, LoraSpec, OptimStepArgs
from tinsmith.bus.protocol.errors import (
    CommandFailed,
    DamagedCheckpoint,
    InvalidInput,
    NoGradients,
    NonFinite,
    UnknownVersion,
)

LORA = CreateModelArgs(base="tiny", lora=LoraSpec(rank=4, seed=1), metadata={"who": "me"})
FULL = CreateModelArgs(base="tiny")
BOTH = pytest.mark.parametrize("args", [LORA, FULL], ids=["lora", "full"])
STEP = OptimStepArgs(lr=1e-2)


def engine_of(path: Path, mesh: DeviceMesh | None = None) -> Engine:
    torch.set_num_threads(1)
    return Engine(path, alias="tiny", mesh=mesh, token_budget=48)


def forward(engine: Engine, seed: int) -> None:
    data = batch(4, seed=seed)
    engine.forward("m", data, engine.plan(data), ForwardArgs(loss="cross_entropy"), backward=True)


def state(engine: Engine) -> dict[str, np.ndarray]:
    return {n: gather_shards(p.detach()).numpy().copy() for n, p in engine._models["m"].params.items()}


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def resume(mesh: DeviceMesh | None, base: Path, place: Path, args: CreateModelArgs) -> dict[str, bool]:
    """Train, save, train on; then load into another engine and train on alike."""
    straight = engine_of(base, mesh)
    straight.create("m", args)
    forward(straight, 0)
    straight.optim_step("m", STEP)
    straight.save("m", place / "saved", {"seq": 3})
    saved = state(straight)
    forward(straight, 1)
    straight.snapshot("m", place / "snapshot", {"seq": 4})
    forward(straight, 2)
    columns = straight.optim_step("m", STEP)

    resumed = engine_of(base, mesh)
    resumed.create("m", args)
    forward(resumed, 5)
    meta = resumed.load("m", place / "saved", optimizer=True)
    found = {"meta": meta == {"seq": 3}, "weights": same(state(resumed), saved)}
    with pytest.raises(NoGradients):
        resumed.optim_step("m", STEP)
    forward(resumed, 1)
    forward(resumed, 2)
    found["columns"] = resumed.optim_step("m", STEP) == columns
    found["resumed"] = same(state(resumed), state(straight))

    resumed.load("m", place / "saved", optimizer=False)
    forward(resumed, 1)
    forward(resumed, 2)
    found["fresh optimizer"] = resumed.optim_step("m", STEP)["step"] == 1 and not same(state(resumed), state(straight))

    restored = engine_of(base, mesh)
    found["snapshot meta"] = restored.restore("m", place / "snapshot") == {"seq": 4}
    found["arguments"] = restored.info("m")["metadata"] == dict(args.metadata)
    forward(restored, 2)
    found["restored columns"] = restored.optim_step("m", STEP) == columns
    found["restored"] = same(state(restored), state(straight))
    return found


@BOTH
@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_model_is_the_undisturbed_one_to_the_bit(
    llama: Path, tmp_path: Path, args: CreateModelArgs, world: int
) -> None:
    results = [resume(None, llama, tmp_path, args)] if world == 1 else run_ranks(2, resume, llama, tmp_path, args)
    for found in results:
        assert all(found.values()), found


def restore_elsewhere(mesh: DeviceMesh, base: Path, place: Path) -> dict[str, np.ndarray]:
    engine = engine_of(base, mesh)
    engine.restore("m", place / "snapshot")
    forward(engine, 2)
    engine.optim_step("m", STEP)
    return state(engine)


@BOTH
def test_a_snapshot_goes_on_with_another_number_of_ranks(llama: Path, tmp_path: Path, args: CreateModelArgs) -> None:
    resume(None, llama, tmp_path, args)
    expected = restore_elsewhere(None, llama, tmp_path)
    for got in run_ranks(3, restore_elsewhere, llama, tmp_path):
        for name, value in expected.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5)


def test_a_step_that_must_not_be_taken_is_not_taken_after_a_restart_either(llama: Path, tmp_path: Path) -> None:
    engine = engine_of(llama)
    engine.create("m", LORA)
    forward(engine, 0)
    engine._models["m"].spoilt = True
    engine.snapshot("m", tmp_path / "snapshot")
    again = engine_of(llama)
    again.restore("m", tmp_path / "snapshot")
    for one in (engine, again):
        with pytest.raises(NonFinite, match="loss"):
            one.optim_step("m", STEP)
        forward(one, 1)
        assert one.optim_step("m", STEP)["step"] == 1


def test_a_checkpoint_of_another_shape_is_refused_and_changes_nothing(llama: Path, tmp_path: Path) -> None:
    engine = engine_of(llama)
    engine.create("m", LORA)
    engine.save("m", tmp_path / "saved")
    before = state(engine)
    other = CreateModelArgs(base="tiny", lora=LoraSpec(rank=8))
    for name, args in (("rank", other), ("full", FULL)):
        engine.create(name, args)
        with pytest.raises(InvalidInput, match="same base and lora"):
            engine.load(name, tmp_path / "saved", optimizer=False)
    with pytest.raises(UnknownVersion):
        engine.load("m", tmp_path / "absent", optimizer=False)
    assert same(state(engine), before)


def test_a_damaged_file_is_found(llama: Path, tmp_path: Path) -> None:
    engine = engine_of(llama)
    engine.create("m", LORA)
    engine.save("m", tmp_path / "saved")
    file = tmp_path / "saved" / checkpoint.TENSORS
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="not as it was written"):
        engine.load("m", tmp_path / "saved", optimizer=False)


def test_a_write_that_fails_leaves_the_earlier_checkpoint_whole(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "c", {"a": torch.ones(2)}, {"n": 1})

    def breaks(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise OSError("disk full")

    with pytest.raises(OSError):
        checkpoint.write_directory(tmp_path / "c", breaks)
    tensors, meta = checkpoint.read(tmp_path / "c")
    assert meta == {"n": 1}
    assert tensors["a"].tolist() == [1, 1]
    checkpoint.write(tmp_path / "c", {"a": torch.zeros(2)}, {"n": 2})
    assert checkpoint.read(tmp_path / "c")[1] == {"n": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def save_where_no_file_can_be(mesh: DeviceMesh, base: Path, place: Path) -> str:
    engine = engine_of(base, mesh)
    engine.create("m", LORA)
    with pytest.raises(CommandFailed) as caught:
        engine.save("m", place)
    engine.create("n", LORA)
    return str(caught.value)


def test_a_disk_error_of_the_writer_is_every_ranks_error(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    first, second = run_ranks(2, save_where_no_file_can_be, llama, tmp_path / "file" / "saved")
    assert first == second


def trained(base: Path, args: CreateModelArgs) -> tuple[Engine, Callable[[torch.Tensor], torch.Tensor]]:
    engine = engine_of(base)
    engine.create("other", CreateModelArgs(base="tiny", lora=LoraSpec(rank=2, mlp=False)))
    engine.create("m", args)
    for seed in range(2):
        forward(engine, seed)
        engine.optim_step("m", STEP)
    model = engine._models["m"]

    @torch.no_grad()
    def logits(tokens: torch.Tensor) -> torch.Tensor:
        model.activate()
        result: torch.Tensor = model.scorer.model(input_ids=tokens).logits  # type: ignore[operator]
        return result

    return engine, logits


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("llama", LoraSpec(rank=4)),
        ("llama", LoraSpec(rank=4, alpha=3.0, mlp=False)),
        ("llama", LoraSpec(rank=3, unembed=True)),
        ("llama-tied", LoraSpec(rank=3, unembed=True)),
        ("gpt2", LoraSpec(rank=4)),
        ("gemma3", LoraSpec(rank=4)),
        ("qwen3_moe", LoraSpec(rank=4, mlp=False)),
    ],
)
def test_a_published_adapter_gives_equal_logits_in_peft(
    model_of: Callable[[str], Path], tmp_path: Path, kind: str, spec: LoraSpec
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = model_of(kind)
    engine, logits = trained(base, CreateModelArgs(base="tiny", lora=spec))
    engine.publish("m", tmp_path / "adapter")
    checkpoint.verify_directory(tmp_path / "adapter")
    tokens = torch.arange(3, 20)[None]
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    bare = plain(input_ids=tokens).logits
    loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    got = loaded(input_ids=tokens).logits
    torch.testing.assert_close(got, logits(tokens), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(got, bare, atol=1e-3)


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen3_moe"])
def test_a_published_full_model_gives_equal_logits_in_transformers(
    model_of: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    from transformers import AutoModelForCausalLM

    engine, logits = trained(model_of(kind), FULL)
    engine.publish("m", tmp_path / "full")
    tokens = torch.arange(3, 20)[None]
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "full").eval()(input_ids=tokens).logits
    torch.testing.assert_close(got, logits(tokens), rtol=1e-5, atol=1e-5)


def publish_sharded(mesh: DeviceMesh, base: Path, place: Path) -> Any:
    engine = engine_of(base, mesh)
    engine.create("m", FULL)
    forward(engine, 0)
    engine.optim_step("m", STEP)
    engine.publish("m", place / "full")
    return state(engine)


def test_a_sharded_model_is_published_whole(llama: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    expected, _ = run_ranks(2, publish_sharded, llama, tmp_path)
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "full").named_parameters())
    for name, value in expected.items():
        np.testing.assert_array_equal(loaded[name].detach().numpy(), value)

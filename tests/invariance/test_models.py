"""Other architectures: log-probs, metrics, gradients and weights are the float64 reference's on 1 and 2 ranks."""

from __future__ import annotations

import pytest
from invariance.cases import Bearing, Case, Way
from invariance.script import Bases, Groups
from invariance.test_splits import CUT, PLAIN, hold

ROUNDS = (
    ((5, Bearing("some")), (23, Bearing("all")), (1, Bearing("all"))),
    ((12, Bearing("some")), (12, Bearing("none"))),
)


DENSE = [(kind, spec) for kind in ("llama-tied", "qwen3", "gemma3-tied") for spec in ("full", "head")]
DENSE += [("qwen3-tied", "lora"), ("gemma3", "lora"), ("granite", "attention")]


@pytest.mark.parametrize(("kind", "spec"), DENSE)
def test_dense_models(group_of: Groups, base_of: Bases, kind: str, spec: str) -> None:
    hold(group_of, base_of, Case(spec, "ppo", None, ROUNDS, 21), {1: PLAIN, 2: CUT}, kind)


@pytest.mark.parametrize("spec", ["full", "attention"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_mixtures_of_experts(group_of: Groups, base_of: Bases, kind: str, spec: str) -> None:
    """An expert that no token of a rank chose still takes part in the exchange of gradients."""
    lonely = Way(budget=8, order=(0.3, 0.1, 0.2), cuts=frozenset({1}), between=())
    hold(group_of, base_of, Case(spec, "cross_entropy", None, ROUNDS, 22), {1: PLAIN, 2: lonely}, kind)

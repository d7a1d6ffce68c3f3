"""A gradient that is not finite on one rank is one decision of all ranks, taken before anything changes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from invariance.groups import Answer, Call, create, forward_backward, step
from invariance.script import Bases, Groups

from tinsmith.bus.protocol.datum import Datum
from tinsmith.bus.protocol.errors import NonFinite

GOOD = [Datum([3, 4, 5], {"target_tokens": [4, 5, 6], "logprobs": [-5.0] * 3, "advantages": [1.0, -0.5, 0.0]})] * 2
SPECS = pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])


def overflowing(advantages: list[float]) -> list[Datum]:
    """Ratios of about exp(95), beyond float32, in the first of two datums, so on one of two ranks."""
    bad = Datum([3, 4, 5], {"target_tokens": [4, 5, 6], "logprobs": [-100.0] * 3, "advantages": advantages})
    return [bad, GOOD[0]]


def bad_batch(kind: str) -> Call:
    # Of two infinities with different signs the sum is NaN.
    return forward_backward(overflowing([1.0, 1.0, 1.0] if kind == "inf" else [1.0, -1.0, 1.0]), "importance_sampling")


def warmed(lora: dict | None) -> list[Call]:
    """A model that has made a step, so that its optimizer holds something."""
    return [create("m", lora), forward_backward(GOOD, "importance_sampling"), step(lr=1e-2)]


LOOK = [Call("weights"), Call("optimizer")]


def assert_unchanged(before: list[Answer], after: list[Answer], skipped: int = 0) -> None:
    for left, right in zip(before, after, strict=True):
        for name, tensor in left.tensors.items():
            expected = np.array(skipped) if name == "skipped_in_a_row" else tensor
            np.testing.assert_array_equal(right.tensors[name], expected, err_msg=name)


@SPECS
@pytest.mark.parametrize("kind", ["inf", "nan"])
@pytest.mark.parametrize("world", [1, 2])
def test_it_is_refused_by_all_ranks_and_changes_nothing(
    group_of: Groups, base_of: Bases, lora: dict | None, kind: str, world: int
) -> None:
    calls = [*warmed(lora), *LOOK, bad_batch(kind), step(lr=1e-2), *LOOK]
    calls += [forward_backward(GOOD, "importance_sampling"), step(lr=1e-2)]
    answers = group_of(world).run(base_of("llama"), calls)
    batch, refused = answers[5:7]
    assert world == 1 or batch.datums_of_ranks == (1, 1)
    assert batch.error is None
    assert not math.isfinite(batch.metrics["loss:sum"])
    assert {"loss:sum", "total_loss:sum"} <= set(batch.flags)
    assert isinstance(refused.error, NonFinite)
    assert_unchanged(answers[3:5], answers[7:9])
    assert answers[-1].metrics["step"] == 2
    assert math.isfinite(answers[-1].metrics["grad_norm"])


@SPECS
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_registered_loss_that_is_nan_on_one_rank_stops_the_step_also_where_its_gradient_is_finite(
    group_of: Groups, base_of: Bases, lora: dict | None, world: int
) -> None:
    def batch(*levels: float) -> Call:
        shared = {"target_tokens": [4, 5, 6], "advantages": [1.0, -0.5, 0.5]}
        return forward_backward([Datum([3, 4, 5], {**shared, "level": [level] * 3}) for level in levels], "levelled")

    calls = [create("m", lora), batch(1.0, 1.0), step(lr=1e-2), *LOOK]
    calls += [batch(1.0, 1.0), batch(1.0, -1.0, 1.0), batch(1.0), Call("gradients"), step(lr=1e-2), *LOOK]
    calls += [batch(1.0, 1.0, 1.0), step(lr=1e-2)]
    answers = group_of(world).run(base_of("llama"), calls)
    spoilt, gradients, refused = answers[6], answers[8], answers[9]
    assert math.isnan(spoilt.metrics["loss:sum"])
    assert all(np.isfinite(tensor).all() for tensor in gradients.tensors.values())
    assert isinstance(refused.error, NonFinite)
    assert "loss" in refused.error.message
    assert_unchanged(answers[3:5], answers[10:12])
    assert answers[-1].error is None
    assert answers[-1].metrics["step"] == 2


@SPECS
def test_skip_leaves_the_step_out_says_so_and_abort_after_ends_it(
    group_of: Groups, base_of: Bases, lora: dict | None
) -> None:
    skip = {"lr": 1e-2, "on_non_finite": "skip", "abort_after": 3}
    calls = [*warmed(lora), *LOOK]
    for _ in range(3):
        calls += [bad_batch("nan"), step(**skip), *LOOK]
    answers = group_of(2).run(base_of("llama"), calls)
    before, rounds = answers[3:5], [answers[5 + 4 * i : 9 + 4 * i] for i in range(3)]
    for number, (_, stepped, *looks) in enumerate(rounds):
        if number < 2:
            assert stepped.error is None
            assert (stepped.metrics["skipped"], stepped.metrics["step"], stepped.metrics["clip_coef"]) == (1, 1, 0)
            assert "grad_norm" in stepped.flags
        else:
            assert isinstance(stepped.error, NonFinite)
            assert "3 steps in a row" in stepped.error.message
        assert_unchanged(before, looks, skipped=min(number + 1, 2))


def test_the_good_gradient_of_a_neighbour_steps_while_ours_is_refused(group_of: Groups, base_of: Bases) -> None:
    calls = [create("x", {"rank": 2}), create("m", {"rank": 4}), bad_batch("inf")]
    calls += [forward_backward(GOOD, "importance_sampling", model="x"), step(lr=1e-2), step("x", lr=1e-2)]
    *_, ours, theirs = group_of(2).run(base_of("llama"), calls)
    assert isinstance(ours.error, NonFinite)
    assert theirs.error is None
    assert theirs.metrics["update_norm"] > 0

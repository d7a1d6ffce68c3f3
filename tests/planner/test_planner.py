"""A plan places every datum once, keeps ranks in step and balanced, and wastes little on padding."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.actors.schedule.planner import Plan, plan_batch
from tinsmith.bus.protocol.errors import InvalidDatum, InvalidInput

LENGTHS = st.lists(st.integers(1, 600), min_size=1, max_size=60)
RANKS = st.integers(1, 9)
BUDGET = st.integers(1, 3000)


def _cost(lengths: list[int], micro_batch: tuple[int, ...]) -> int:
    return len(micro_batch) * max((lengths[index] for index in micro_batch), default=0)


def _loads(lengths: list[int], plan: Plan) -> list[int]:
    return [sum(_cost(lengths, micro_batch) for micro_batch in rank) for rank in plan.ranks]


def _log_normal(seed: int, datums: int = 256) -> list[int]:
    lengths = np.random.default_rng(seed).lognormal(np.log(96), 0.8, datums)
    return np.clip(lengths, 16, 512).astype(int).tolist()


@settings(max_examples=150, deadline=None)
@given(LENGTHS, RANKS, BUDGET)
def test_any_batch_is_placed_once_in_step_within_budget_and_balanced(lengths, ranks, budget) -> None:
    plan = plan_batch(lengths, ranks, budget)
    micro_batches = [micro_batch for rank in plan.ranks for micro_batch in rank]
    assert sorted(index for micro_batch in micro_batches for index in micro_batch) == list(range(len(lengths)))
    assert len(plan.ranks) == ranks
    assert {len(rank) for rank in plan.ranks} == {plan.micro_batches}
    for micro_batch in micro_batches:
        assert _cost(lengths, micro_batch) <= budget or len(micro_batch) == 1
    loads = _loads(lengths, plan)
    assert max(loads) <= sum(loads) / ranks + max(_cost(lengths, micro_batch) for micro_batch in micro_batches)
    assert plan.tokens == sum(lengths)
    assert plan.computed_tokens == sum(loads)
    assert plan == plan_batch(lengths, ranks, budget)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, RANKS, BUDGET)
def test_no_round_of_micro_batches_is_empty_on_every_rank(lengths, ranks, budget) -> None:
    plan = plan_batch(lengths, ranks, budget)
    assert all(any(rank[place] for rank in plan.ranks) for place in range(plan.micro_batches))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_at_least_nine_tenths_of_the_computed_tokens_are_real(seed: int, ranks: int) -> None:
    lengths = _log_normal(seed)
    plan = plan_batch(lengths, ranks, 2048)
    assert plan.tokens / plan.computed_tokens >= 0.9
    loads = _loads(lengths, plan)
    assert max(loads) <= 1.03 * sum(loads) / ranks


def test_micro_batches_are_not_needlessly_small() -> None:
    lengths = _log_normal(1)
    plan = plan_batch(lengths, 2, 8192)
    filled = [_cost(lengths, micro_batch) for rank in plan.ranks for micro_batch in rank]
    assert min(filled) >= 8192 / 8


def test_equal_lengths_fill_the_budget() -> None:
    plan = plan_batch([128] * 64, 2, 1024)
    assert plan.micro_batches == 4
    assert {len(micro_batch) for rank in plan.ranks for micro_batch in rank} == {8}


def test_a_small_batch_is_one_micro_batch_a_rank_of_about_equal_work() -> None:
    lengths = [90, 100, 110, 95, 105, 100, 98, 102]
    plan = plan_batch(lengths, 2, 65536)
    assert plan.micro_batches == 1
    assert max(_loads(lengths, plan)) <= 1.1 * min(_loads(lengths, plan))


def test_ranks_without_a_datum_get_empty_micro_batches() -> None:
    plan = plan_batch([5, 9, 3], 5, 64)
    assert plan.ranks == (((1,),), ((0,),), ((2,),), ((),), ((),))


def test_one_datum() -> None:
    assert plan_batch([7], 1, 64) == Plan(ranks=(((0,),),), computed_tokens=7, tokens=7)
    assert plan_batch([7], 2, 64).ranks == (((0,),), ((),))


def test_a_datum_longer_than_the_budget_is_alone_in_its_micro_batch() -> None:
    plan = plan_batch([10, 500, 10, 10], 1, 32)
    assert (1,) in plan.ranks[0]
    assert plan.computed_tokens == 530


def test_the_plan_is_the_same_in_another_process() -> None:
    lengths = _log_normal(2, 64)
    code = f"from tinsmith.actors.schedule.planner import plan_batch; print(plan_batch({lengths}, 3, 1024))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == repr(plan_batch(lengths, 3, 1024))


def test_the_plan_gives_the_columns_of_its_padding() -> None:
    plan = plan_batch([10, 8, 9, 10], 2, 64)
    scalars = plan.scalars()
    assert scalars["tokens_computed"] - scalars["padding_tokens"] == 37
    assert scalars["micro_batches"] == 1


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no datum"):
        plan_batch([], 1, 64)
    with pytest.raises(InvalidInput, match="at least 1 rank"):
        plan_batch([1], 0, 64)
    with pytest.raises(InvalidInput, match="at least 1 token"):
        plan_batch([1], 1, 0)
    with pytest.raises(InvalidDatum, match="length is 0") as caught:
        plan_batch([4, 0], 1, 64)
    assert caught.value.datum == 1


def test_a_thousand_datums_are_planned_in_milliseconds() -> None:
    lengths = _log_normal(3, 1024)

    def seconds() -> float:
        start = time.perf_counter()
        plan_batch(lengths, 2, 4096)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(10)) < 10e-3  # about 2 ms on an idle core; room for a busy one

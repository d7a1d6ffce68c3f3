"""However work is cut, ordered, dealt over ranks and mixed with others' work, every number is the reference's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from invariance.cases import CONTEXT, SPECS, Bearing, Case, Way, cases, ways
from invariance.groups import Call, create, forward_backward, step
from invariance.script import Bases, Groups, Truth, carry_out, start
from reference.cases import CONFIGS, LOSSES

PLAIN = Way(budget=64, order=(0.0,), cuts=frozenset(), between=())
CUT = Way(budget=33, order=(0.5, 0.1, 0.9), cuts=frozenset({1, 2, 4}), between=("adapter steps", "scores"))


def hold(group_of: Groups, base_of: Bases, case: Case, ways_of: dict[int, Way], kind: str = "llama") -> None:
    """Carry the case out as told on each number of ranks."""
    base = base_of(kind)
    first, judge = start(group_of(1), base, case)
    truth = Truth(judge, case)
    for world, way in ways_of.items():
        carry_out(group_of(world), base, case, first, truth, way)


@given(case=cases(), way_of=st.tuples(ways, ways, ways))
def test_no_number_depends_on_ranks_budgets_calls_order_or_neighbours(
    group_of: Groups, base_of: Bases, case: Case, way_of: tuple[Way, Way, Way]
) -> None:
    hold(group_of, base_of, case, dict(zip((1, 2, 3), way_of, strict=True)))


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_is_the_references_with_chunks_and_neighbours(group_of: Groups, base_of: Bases, loss: str) -> None:
    lengths = ((5, "some"), (17, "all"), (5, "all"), (1, "all"), (30, "none"), (4, "some"))
    rounds = (tuple((length, Bearing(kind)) for length, kind in lengths),) * 2
    hold(group_of, base_of, Case("lora", loss, None, rounds, 3), {1: PLAIN, 2: CUT})


@pytest.mark.parametrize("spec", ["lora", "full"])
def test_every_length_up_to_the_context_in_one_batch(group_of: Groups, base_of: Bases, spec: str) -> None:
    rounds = (tuple((n, Bearing("some")) for n in range(1, CONTEXT + 1)),)
    hold(group_of, base_of, Case(spec, "ppo", None, rounds, 1), {1: PLAIN, 3: Way(300, (0.2, 0.1), frozenset(), ())})


@pytest.mark.parametrize("spec", ["lora", "full"])
@pytest.mark.parametrize("k", [1, 3])
def test_many_targets_a_token(group_of: Groups, base_of: Bases, spec: str, k: int) -> None:
    rounds = (((9, Bearing("some")), (2, Bearing("all")), (20, Bearing("some")), (4, Bearing("none"))),)
    hold(group_of, base_of, Case(spec, "cross_entropy", k, rounds, 2), {1: CUT, 2: PLAIN})


@pytest.mark.parametrize("spec", ["lora", "full"])
@pytest.mark.parametrize("loss", ["cross_entropy", "dro"])
def test_ranks_that_get_no_datum_change_nothing(group_of: Groups, base_of: Bases, spec: str, loss: str) -> None:
    """Of losses that every token bears, so that a token made up for a rank without data would show."""
    case = Case(
        spec, loss, None, (((7, Bearing("all")),), ((3, Bearing("some")), (5, Bearing("all")))), 4, weighted=False
    )
    hold(group_of, base_of, case, {1: PLAIN, 2: PLAIN, 3: PLAIN})
    first, judge = start(group_of(1), base_of("llama"), case)
    call = forward_backward(case.batch(judge, 0), loss, CONFIGS[loss])
    answer = group_of(3).run(base_of("llama"), [*first, call])[-1]
    assert sorted(answer.datums_of_ranks) == [0, 0, 1]


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "dro"])
@pytest.mark.parametrize("spec", ["lora", "full"])
def test_a_batch_without_a_loss_bearing_token_has_loss_0_gradient_0_and_no_nan(
    group_of: Groups, base_of: Bases, loss: str, spec: str
) -> None:
    case = Case(spec, loss, None, (((7, Bearing("none")), (3, Bearing("none"))),), 5)
    first, judge = start(group_of(1), base_of("llama"), case)
    call = forward_backward(case.batch(judge, 0), loss, CONFIGS[loss])
    before, answer, gradients, stepped, after = group_of(2).run(
        base_of("llama"), [*first, Call("weights"), call, Call("gradients"), step(lr=0.1), Call("weights")]
    )[len(first) :]
    assert not answer.flags
    assert {key: value for key, value in answer.metrics.items() if value} == {
        "tokens:sum": 10.0,
        "sequences:sum": 2.0,
        **{key: answer.metrics[key] for key in ("tokens_computed:sum", "micro_batches:sum")},
        **{key: value for key, value in answer.metrics.items() if key.startswith("padding_share") and value},
    }
    assert not any(tensor.any() for tensor in gradients.tensors.values())
    assert stepped.metrics["grad_norm"] == stepped.metrics["update_norm"] == 0.0
    assert all((after.tensors[name] == tensor).all() for name, tensor in before.tensors.items())


def test_the_plan_keys_tell_of_the_plan(group_of: Groups, base_of: Bases) -> None:
    case = Case("lora", "cross_entropy", None, (((10, Bearing("all")), (9, Bearing("all"))),), 6)
    first, judge = start(group_of(1), base_of("llama"), case)
    data = case.batch(judge, 0)
    for budget, computed in ((64, 20.0), (10, 19.0)):
        call = forward_backward(data, case.loss, budget=budget)
        metrics = group_of(1).run(base_of("llama"), [*first, call])[-1].metrics
        assert metrics["tokens_computed:sum"] == computed
        assert metrics["padding_share:mean"] == pytest.approx(1 - 19 / computed)


def test_the_numbers_are_the_references_at_every_adapter_setting(group_of: Groups, base_of: Bases) -> None:
    rounds = (((5, Bearing("all")), (12, Bearing("some"))),) * 2
    for spec in SPECS:
        hold(group_of, base_of, Case(spec, "importance_sampling", None, rounds, 7), {2: CUT})


def test_the_seed_alone_chooses_the_first_weights_of_an_adapter(group_of: Groups, base_of: Bases) -> None:
    def first_weights(world: int, seed: int, *before: Call) -> dict:
        calls = [*before, create("m", {"rank": 4, "seed": seed}), Call("weights")]
        return group_of(world).run(base_of("llama"), calls)[-1].tensors

    alone = first_weights(1, 7)
    crowded = first_weights(3, 7, create("x", {"rank": 2, "seed": 7}), create("y"))
    other = first_weights(2, 8)
    assert all((crowded[name] == tensor).all() for name, tensor in alone.items())
    assert any((other[name] != tensor).any() for name, tensor in alone.items())

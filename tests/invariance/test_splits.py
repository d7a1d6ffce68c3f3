"""However work is cut, ordered, dealt over ranks and mixed with others' work, every number is the reference's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import given, note
from hypothesis import strategies as st
from reference.cases import CONFIGS

from invariance.cases import SPECS, STEP, Case, Way, cases, neighbour, random_adapters, scale_of, ways
from invariance.groups import Answer, Call, RankGroup, create, forward_backward, step
from invariance.judge import COUNTS, TOLERANCE, Judge, assert_logprobs, assert_metrics, assert_tensors, norm
from tinsmith.bus.errors import InvalidDatum

Groups = Callable[[int], RankGroup]
Bases = Callable[[str], Path]


def start(group: RankGroup, base: Path, case: Case) -> tuple[list[Call], Judge]:
    """The calls that make the model of the case, and its judge, both from the same weights."""
    spec = SPECS[case.spec]
    if spec is None:
        return [create()], Judge(base)
    shapes = group.run(base, [create("m", spec), Call("weights")])[1].tensors
    adapters = random_adapters(shapes, case.seed)
    return [create("m", spec), Call("write", tensors=adapters)], Judge(base, adapters, scale_of(spec))


class Truth:
    """What the reference says of each round, and the data of each."""

    def __init__(self, judge: Judge, case: Case) -> None:
        self.rounds: list[dict[str, Any]] = []
        for number in range(len(case.rounds)):
            data = case.batch(judge, number)
            logprobs, rows = judge.forward_backward(data, case.loss, CONFIGS[case.loss])
            gradient, magnitude = judge.trainer.gradients(), judge.magnitude
            columns = judge.step(STEP)
            weights = {name: p.detach().clone() for name, p in judge.trainer.parameters.items()}
            self.rounds.append(
                {
                    "data": data,
                    "logprobs": logprobs,
                    "rows": rows,
                    "gradient": gradient,
                    "magnitude": magnitude,
                    "columns": columns,
                    "weights": weights,
                }
            )


def carry_out(group: RankGroup, base: Path, case: Case, first: list[Call], truth: Truth, way: Way) -> None:
    """Run the case this way and hold every answer against the truth."""
    script: list[tuple[Call, Callable[[Answer], None]]] = [(call, _ignore) for call in first]
    others = 0
    for told in truth.rounds:
        data = told["data"]
        for chunk in way.chunks(len(data)):
            mine = [data[i] for i in chunk]
            right = partial(assert_chunk, told, chunk)
            script.append((forward_backward(mine, case.loss, CONFIGS[case.loss], budget=way.budget), right))
            for what in way.between:
                others += 1
                judged = {"scores": right, "refused": _assert_refused}.get(what, _ignore)
                script += [(call, judged) for call in neighbour(what, mine, case, others)]
        script += [
            (Call("gradients"), partial(_assert_gradients, told)),
            (step(**STEP), partial(assert_step, told)),
            (Call("weights"), partial(_assert_weights, told)),
        ]
    answers = group.run(base, [call for call, _ in script])
    for (_, check), answer in zip(script, answers, strict=True):
        check(answer)


def _ignore(answer: Answer) -> None:
    assert answer.error is None, answer.error


def _assert_refused(answer: Answer) -> None:
    assert isinstance(answer.error, InvalidDatum)


def _assert_gradients(told: dict[str, Any], answer: Answer) -> None:
    assert_tensors(answer.tensors, told["gradient"], told["magnitude"])


def _assert_weights(told: dict[str, Any], answer: Answer) -> None:
    assert_tensors(answer.tensors, told["weights"], max(1.0, norm(told["weights"])))


def assert_chunk(told: dict[str, Any], chunk: list[int], answer: Answer) -> None:
    assert answer.error is None, answer.error
    assert not answer.flags
    assert_metrics(answer.metrics, {name: [column[i] for i in chunk] for name, column in told["rows"].items()})
    assert_logprobs(answer.logprobs, [told["logprobs"][i] for i in chunk])


def assert_step(told: dict[str, Any], answer: Answer) -> None:
    assert answer.error is None, answer.error
    expected = told["columns"]
    assert set(answer.metrics) == set(expected)
    for key, value in expected.items():
        got = answer.metrics[key]
        if key in COUNTS:
            assert got == value, key
        elif key == "grad_norm":
            assert abs(got - value) <= TOLERANCE * max(told["magnitude"], value)
        else:
            # Clipping and the update follow from the gradient, whose terms may cancel: as exact as those allow.
            cancelled = max(1.0, told["magnitude"] / max(expected["grad_norm"], 1e-30)) if value else 1.0
            assert abs(got - value) <= TOLERANCE * cancelled * max(abs(value), 1e-3), (key, got, value)


@given(case=cases(), way_of=st.tuples(ways, ways, ways))
def test_no_number_depends_on_ranks_budgets_calls_order_or_neighbours(
    group_of: Groups, base_of: Bases, case: Case, way_of: tuple[Way, Way, Way]
) -> None:
    base = base_of("llama")
    first, judge = start(group_of(1), base, case)
    truth = Truth(judge, case)
    for world, way in zip((1, 2, 3), way_of, strict=True):
        note(f"{world} ranks")
        carry_out(group_of(world), base, case, first, truth, way)

"""Carrying a case out on a group of ranks and holding every answer against the float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from invariance.cases import SPECS, STEP, Case, Way, neighbour, random_adapters, scale_of
from invariance.groups import Answer, Call, RankGroup, create, forward_backward, step
from invariance.judge import COUNTS, ROUNDING, TOLERANCE, Judge, assert_logprobs, assert_metrics, assert_tensors, norm
from reference.cases import CONFIGS

from tinsmith.bus.protocol.errors import InvalidDatum

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
    for number, ((call, check), answer) in enumerate(zip(script, answers, strict=True)):
        try:
            check(answer)
        except AssertionError as error:
            error.add_note(f"call {number} of {len(script)} ({call.work}) on {group.world} ranks, {way}")
            raise


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
            cancelled = max(1.0, told["magnitude"] / expected["grad_norm"]) if expected["grad_norm"] else 1.0
            # What was added is known to the rounding of the float32 weights that it was added to.
            rounding = ROUNDING * expected["param_norm"] if key == "update_norm" else 0.0
            assert abs(got - value) <= TOLERANCE * cancelled * abs(value) + rounding, (key, got, value)

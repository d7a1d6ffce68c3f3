"""A batch that the official SDK splits into chunks and combines again has the metrics of the unsplit batch."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt

import pytest
from invariance.cases import Bearing, Case
from invariance.groups import Answer, Call, forward, forward_backward
from invariance.judge import COUNTS, OF_THE_PLAN, TOLERANCE, assert_metrics, assert_tensors, norm
from invariance.script import Bases, Groups, start
from metrics.test_sdk import NOT_COMBINED
from reference.cases import CONFIGS, LOSSES
from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results
from tinker.types import ForwardBackwardOutput

LENGTHS = (3, 20, 1, 9, 14, 2, 6, 30)
ROUND = tuple((n, Bearing("none" if n == 9 else "some" if n > 3 else "all")) for n in LENGTHS)


def combined(answers: list[Answer]) -> dict[str, float]:
    """What the SDK's reducer makes of the chunks."""
    chunks = [
        ForwardBackwardOutput(loss_fn_output_type="", loss_fn_outputs=[{} for _ in a.logprobs], metrics=a.metrics)
        for a in answers
    ]
    return dict(combine_fwd_bwd_output_results(chunks).metrics)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("sizes", [(3, 5), (2, 1, 4, 1)], ids=str)
def test_chunks_combined_by_the_sdk_equal_the_unsplit_batch(
    group_of: Groups, base_of: Bases, loss: str, sizes: tuple[int, ...]
) -> None:
    case = Case("lora", loss, None, (ROUND,), 11)
    base, group = base_of("llama"), group_of(2)
    first, judge = start(group, base, case)
    data = case.batch(judge, 0)
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    chunks = [data[a:b] for a, b in pairwise(edges)]
    config = CONFIGS[loss]
    *_, whole, gradient = group.run(base, [*first, forward_backward(data, loss, config), Call("gradients")])
    *parts, accumulated = group.run(
        base, [*first, *(forward_backward(chunk, loss, config) for chunk in chunks), Call("gradients")]
    )[len(first) :]
    got = combined(parts)
    exact = set(whole.metrics) - set(NOT_COMBINED) - OF_THE_PLAN
    for key in exact:
        if key in COUNTS:
            assert got[key] == whole.metrics[key], key
        else:
            assert got[key] == pytest.approx(whole.metrics[key], rel=TOLERANCE, abs=TOLERANCE), key
    tokens = got["num_tokens:sum"]
    for key in set(whole.metrics) & {key for key in NOT_COMBINED if key.endswith(":mean")} - OF_THE_PLAN:
        name = key.partition(":")[0]
        assert got[f"{name}:sum"] / tokens == pytest.approx(whole.metrics[key], rel=TOLERANCE, abs=TOLERANCE), key
    if "logprob_gap:std" in whole.metrics:
        mean = got["logprob_gap:sum"] / tokens
        std = sqrt(got["logprob_gap_squares:sum"] / tokens - mean * mean)
        assert std == pytest.approx(whole.metrics["logprob_gap:std"], rel=TOLERANCE)
    assert_tensors(accumulated.tensors, gradient.tensors, max(1.0, norm(gradient.tensors)))


@pytest.mark.parametrize("loss", LOSSES)
def test_forward_publishes_the_keys_and_values_of_forward_backward(group_of: Groups, base_of: Bases, loss: str) -> None:
    case = Case("full", loss, None, (ROUND,), 12)
    base, group = base_of("llama"), group_of(2)
    first, judge = start(group, base, case)
    data = case.batch(judge, 0)
    config = CONFIGS[loss]
    *_, scored, none, trained = group.run(
        base, [*first, forward(data, loss, config), Call("gradients"), forward_backward(data, loss, config)]
    )
    assert scored.metrics == trained.metrics
    assert scored.metrics["loss:sum"] != 0
    assert not any(tensor.any() for tensor in none.tensors.values())


def test_each_request_has_its_own_loss_config(group_of: Groups, base_of: Bases) -> None:
    case = Case("lora", "ppo", None, (ROUND,), 13)
    base, group = base_of("llama"), group_of(2)
    first, judge = start(group, base, case)
    data = case.batch(judge, 0)
    configs = [CONFIGS["ppo"], {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}, {}]
    answers = group.run(base, [*first, *(forward_backward(data, "ppo", config) for config in configs)])[len(first) :]
    for config, answer in zip(configs, answers, strict=True):
        _, rows = judge.forward_backward(data, "ppo", config)
        assert_metrics(answer.metrics, rows)
    assert len({answer.metrics["clip_fraction:sum"] for answer in answers}) == 3

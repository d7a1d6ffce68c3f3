"""The choice of a token: the right distribution, cut where asked, the same for the same uniform number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tinsmith.actors.sampling.engines.builtin.token_choice import Chooser, uniform_stream
from tinsmith.bus.protocol.commands import SampleArgs

CPU = torch.device("cpu")
LOGITS = torch.tensor([0.1, 2.0, -1.0, 1.5, 0.0, -3.0, 1.0, float("-inf")])


def drawn(n: int = 20_000, **args: Any) -> np.ndarray:
    """Share of each token over n evenly spread uniform numbers."""
    chooser = Chooser([SampleArgs(**args)] * n, CPU)
    tokens, _ = chooser(LOGITS.repeat(n, 1), (np.arange(n) + 0.5) / n)
    return np.bincount(tokens.numpy(), minlength=len(LOGITS)) / n


def expected(keep: list[int] | None = None, temperature: float = 1.0) -> np.ndarray:
    p = torch.softmax(LOGITS.double() / temperature, -1)
    if keep is not None:
        p = torch.where(torch.isin(torch.arange(len(p)), torch.tensor(keep)), p, 0)
    return (p / p.sum()).numpy()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_tokens_come_at_their_probability(temperature):
    np.testing.assert_allclose(drawn(temperature=temperature), expected(temperature=temperature), atol=2e-4)


def test_top_k_keeps_the_k_most_likely():
    np.testing.assert_allclose(drawn(top_k=3), expected([1, 3, 6]), atol=2e-4)
    np.testing.assert_allclose(drawn(top_k=1), expected([1]), atol=0)
    np.testing.assert_allclose(drawn(top_k=100), expected(), atol=2e-4)
    np.testing.assert_allclose(drawn(top_k=0), expected(), atol=2e-4)


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    p = expected()
    assert p[1] < 0.6 < p[1] + p[3]
    np.testing.assert_allclose(drawn(top_p=0.6), expected([1, 3]), atol=2e-4)
    np.testing.assert_allclose(drawn(top_p=1e-9), expected([1]), atol=0)


def test_top_p_counts_what_top_k_left_after_temperature():
    p = expected([1, 3, 6], temperature=0.5)
    assert p[1] < 0.8 < p[1] + p[3]
    np.testing.assert_allclose(drawn(top_k=3, top_p=0.8, temperature=0.5), expected([1, 3], 0.5), atol=2e-4)


def test_rows_with_different_parameters_do_not_mix():
    rows = [
        SampleArgs(temperature=0),
        SampleArgs(),
        SampleArgs(top_k=1),
        SampleArgs(temperature=0.7, top_p=0.5),
        SampleArgs(temperature=1e-300),
        SampleArgs(top_k=2, top_p=0.99),
    ]
    u = np.full(len(rows), 0.7)
    together = Chooser(rows, CPU)(LOGITS.repeat(len(rows), 1), u)
    for i, row in enumerate(rows):
        alone = Chooser([row], CPU)(LOGITS[None], u[:1])
        assert together[0][i] == alone[0][0]
        assert together[1][i] == alone[1][0]
    full = torch.log_softmax(LOGITS, -1)
    assert together[0][0] == together[0][2] == together[0][4] == 1
    assert together[1][0] == full[1]
    assert together[1][4] == 0


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.full((2, 6), float("-inf"))
    logits[:, 3] = 0.0
    tokens, logprobs = Chooser([SampleArgs()] * 2, CPU)(logits, np.array([0.0, np.nextafter(1.0, 0.0)]))
    assert tokens.tolist() == [3, 3]
    assert logprobs.tolist() == [0, 0]


def test_the_tail_of_a_large_vocabulary_keeps_its_probability():
    n, draws = 50_000, 200
    logits = torch.zeros(1, n)
    logits[0, 0] = 20.0
    p0 = float(torch.softmax(logits.double(), -1)[0, 0])
    u = p0 + (1 - p0) * (np.arange(draws) + 0.5) / draws
    tokens, _ = Chooser([SampleArgs()] * draws, CPU)(logits.expand(draws, n), u)
    np.testing.assert_allclose(tokens.numpy(), (np.arange(draws) + 0.5) / draws * n, atol=n * 0.01)


def test_logits_that_are_not_finite_show_in_their_own_row_alone():
    bad = LOGITS.clone()
    bad[2] = float("nan")
    for args in (SampleArgs(), SampleArgs(temperature=0), SampleArgs(top_p=0.5), SampleArgs(temperature=0.5, top_k=2)):
        tokens, logprobs = Chooser([args] * 3, CPU)(
            torch.stack([LOGITS, bad, torch.full_like(LOGITS, float("-inf"))]), np.full(3, 0.4)
        )
        assert torch.isnan(logprobs).tolist() == [False, True, True]
        assert ((tokens >= 0) & (tokens < len(LOGITS))).all()


def test_uniform_streams_repeat_and_differ_by_seed_and_index():
    def first(seed: int | None, index: int) -> tuple[float, ...]:
        return tuple(uniform_stream(seed, index).random(4))

    assert first(5, 0) == first(5, 0)
    assert len({first(5, 0), first(5, 1), first(6, 0), first(2**63 - 1, 0), first(None, 0), first(None, 0)}) == 6

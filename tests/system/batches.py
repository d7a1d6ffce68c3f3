"""Batches that the whole-system tests share."""

from __future__ import annotations

import numpy as np

from tinsmith.api import Datum

VOCAB = 160


def supervised(seed: int, lengths: tuple[int, ...] = (5, 17, 3, 30, 9)) -> list[Datum]:
    """Random sequences with random targets and uneven weights."""
    rng = np.random.default_rng(seed)
    return [
        Datum(
            rng.integers(0, VOCAB, n),
            {"target_tokens": rng.integers(0, VOCAB, n), "weights": rng.choice([0.0, 0.5, 1.0], n)},
        )
        for n in lengths
    ]


def rollouts(seed: int, lengths: tuple[int, ...] = (6, 12, 4, 20)) -> list[Datum]:
    """Random rollouts with sampler log-probs near those of a uniform model, and advantages."""
    rng = np.random.default_rng(seed)
    return [
        Datum(
            rng.integers(0, VOCAB, n),
            {
                "target_tokens": rng.integers(0, VOCAB, n),
                "logprobs": -np.log(VOCAB) + 0.1 * rng.standard_normal(n),
                "advantages": np.where(np.arange(n) < 2, 0.0, rng.standard_normal(n)),
            },
        )
        for n in lengths
    ]

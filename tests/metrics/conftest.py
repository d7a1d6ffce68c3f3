"""Batches whose per-token truth is known, and the rows of columns that a worker would return for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tinsmith.actors.metrics import Catalogue

Rows = dict[str, np.ndarray]


@dataclass(frozen=True)
class Batch:
    """gap: logp - q of each token that bears loss, one array a datum (empty: fully masked). rows: worker columns."""

    gap: list[np.ndarray]
    rows: Rows

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate(self.gap)


def _rows(gap: Sequence[np.ndarray]) -> Rows:
    def column(value: Callable[[np.ndarray], float], none: float = 0.0) -> np.ndarray:
        return np.array([value(each) if len(each) else none for each in gap], dtype=np.float64)

    return {
        "loss": column(lambda g: -g.sum()),
        "pg_loss": column(lambda g: -np.exp(g).sum()),
        "entropy": column(lambda g: np.abs(g).sum()),
        "num_tokens": column(len),
        "tokens": column(len) + 3,
        "sequences": np.ones(len(gap)),
        "ratio_sum": column(lambda g: np.exp(g).sum()),
        "ratio_max": column(lambda g: np.exp(g).max(), -np.inf),
        "ratio_min": column(lambda g: np.exp(g).min(), np.inf),
        "clipped_tokens": column(lambda g: float((np.abs(g) > 0.2).sum())),
        "kl_k1_sum": column(lambda g: -g.sum()),
        "kl_k3_sum": column(lambda g: (np.expm1(g) - g).sum()),
        "logprob_gap_sum": column(lambda g: g.sum()),
        "logprob_gap_max": column(lambda g: g.max(), -np.inf),
        "logprob_gap_mean": column(lambda g: g.mean()),
        "logprob_gap_m2": column(lambda g: ((g - g.mean()) ** 2).sum()),
    }


@pytest.fixture(scope="session")
def make_batch() -> Callable[[Sequence[int], int], Batch]:
    """Tokens that bear loss in each datum, seed -> a batch."""

    def make(counts: Sequence[int], seed: int = 0) -> Batch:
        rng = np.random.default_rng(seed)
        gap = [rng.normal(0.1, 0.4, size=count) for count in counts]
        return Batch(gap, _rows(gap))

    return make


@pytest.fixture(scope="session")
def builtin() -> Catalogue:
    return Catalogue.load()


@pytest.fixture
def overlay(tmp_path: Path) -> Callable[[str], Path]:
    """TOML text -> a file that holds it."""

    def write(text: str, name: str = "overlay.toml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write

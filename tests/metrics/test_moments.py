"""Moments merge to those of all values together, in one go or pair by pair."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.actors.metrics.moments import Moments, exact_sum, merge

VALUES = st.lists(st.lists(st.floats(-1e6, 1e6), max_size=6), min_size=1, max_size=6)


def _columns(parts: list[list[float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    means = [float(np.mean(part)) if part else 0.0 for part in parts]
    m2 = [float(((np.array(part) - mean) ** 2).sum()) if part else 0.0 for part, mean in zip(parts, means, strict=True)]
    return np.array([float(len(part)) for part in parts]), np.array(means), np.array(m2)


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_merged_moments_are_those_of_all_values(parts: list[list[float]]) -> None:
    merged = merge(*_columns(parts))
    values = np.array([value for part in parts for value in part])
    if not len(values):
        assert merged is None
        return
    assert merged is not None
    scale = np.abs(values).max() + 1e-9
    assert merged.count == len(values)
    assert merged.mean == pytest.approx(values.mean(), abs=1e-12 * scale)
    assert merged.std == pytest.approx(values.std(), abs=1e-7 * scale)
    assert merged.squares == pytest.approx((values**2).sum(), abs=1e-9 * scale * scale)


def test_merging_all_at_once_equals_chans_pairwise_update() -> None:
    counts, means, m2s = _columns([[1.0, 2.5], [], [4.0], [-3.0, 0.5, 9.0]])
    count, mean, m2 = 0.0, 0.0, 0.0
    for n, other, spread in zip(counts, means, m2s, strict=True):
        delta = other - mean
        total = count + n
        m2 += spread + (delta * delta * count * n / total if total else 0.0)
        mean += delta * n / total if total else 0.0
        count = total
    merged = merge(counts, means, m2s)
    assert merged is not None
    assert (merged.count, merged.mean, merged.m2) == pytest.approx((count, mean, m2), rel=1e-14)


@settings(max_examples=40, deadline=None)
@given(VALUES, st.randoms())
def test_the_order_of_datums_changes_no_bit(parts: list[list[float]], rng) -> None:
    shuffled = list(parts)
    rng.shuffle(shuffled)
    assert merge(*_columns(parts)) == merge(*_columns(shuffled))


def test_sums_are_correctly_rounded_and_keep_what_is_not_finite() -> None:
    assert exact_sum([1e16, 1.0, -1e16]) == 1.0
    assert np.isnan(exact_sum([np.nan, 1.0]))
    assert np.isnan(exact_sum([np.inf, -np.inf]))
    assert exact_sum([1e308, 1e308]) == np.inf


def test_impossible_moments_are_nan_not_an_exception() -> None:
    assert np.isnan(Moments(2.0, 1.0, -1.0).std)
    assert np.isnan(Moments(2.0, 1.0, np.nan).std)

"""Reductions: how the values of a column, one a datum, become the value of a metric.

Every reduction sees the whole command in datum order, and sums are correctly rounded (math.fsum). So a result does not
depend on ranks, micro-batches or the order in which rows were gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite

import numpy as np

from tinsmith.actors.metrics.moments import Column, Moments, exact_sum, merge
from tinsmith.bus.protocol.errors import MetricError, NonFinite

EXACT_INTEGERS = 1 << 53
"""A double counts every integer below this; hashes are kept within it."""

Values = tuple[float, ...]
"""What a reduction yields: nothing when it can't be computed, else one value (`unique`: one for each that differs)."""


class Frame:
    """The columns of one command, with the sums and moments that several metrics share computed once."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self.columns = columns
        self._sums: dict[str, float] = {}
        self._moments: dict[tuple[str, str], Moments | None] = {}

    def total(self, column: str) -> float:
        """Correctly rounded sum over datums."""
        if column not in self._sums:
            self._sums[column] = exact_sum(self.columns[column].tolist())
        return self._sums[column]

    def moments(self, prefix: str, count: str) -> Moments | None:
        """Merged moments of the columns `<prefix>_mean` and `<prefix>_m2`, None when nothing was counted."""
        key = (prefix, count)
        if key not in self._moments:
            columns = self.columns
            self._moments[key] = merge(columns[count], columns[f"{prefix}_mean"], columns[f"{prefix}_m2"])
        return self._moments[key]

    def taking_part(self, column: str, weight: str | None) -> Column:
        """Values of the datums whose weight is not 0 (all when there is no weight)."""
        values = self.columns[column]
        if weight is None:
            return values
        mask = self.columns[weight] != 0
        if mask.shape != values.shape:  # a value of the whole command takes part when any datum does
            mask = np.full(values.shape, mask.any())
        return np.compress(mask, values)


def _sum(frame: Frame, source: str, weight: str | None) -> Values:
    return (frame.total(source),)


def _mean(frame: Frame, source: str, weight: str | None) -> Values:
    assert weight is not None
    divisor = frame.total(weight)
    return (frame.total(source) / divisor,) if divisor != 0 else ()


def _min(frame: Frame, source: str, weight: str | None) -> Values:
    values = frame.taking_part(source, weight)
    lowest = float(np.min(values, initial=np.inf))
    # Without a weight the identity of min is all that tells "no datum took part".
    return () if not len(values) or (weight is None and lowest == np.inf) else (lowest,)


def _max(frame: Frame, source: str, weight: str | None) -> Values:
    values = frame.taking_part(source, weight)
    highest = float(np.max(values, initial=-np.inf))
    return () if not len(values) or (weight is None and highest == -np.inf) else (highest,)


def _last(frame: Frame, source: str, weight: str | None) -> Values:
    values = frame.taking_part(source, weight)
    return (float(values[-1]),) if len(values) else ()


def _slack(frame: Frame, source: str, weight: str | None) -> Values:
    if weight is not None:
        return _mean(frame, source, weight)
    count = len(frame.columns[source])
    return (frame.total(source) / count,) if count else ()


def _unique(frame: Frame, source: str, weight: str | None) -> Values:
    seen: dict[str, float] = {}
    for value in frame.taking_part(source, weight).tolist():
        seen.setdefault(repr(value), value)  # repr: NaN equals itself
    return tuple(seen.values())


def _hash2(frame: Frame, source: str, weight: str | None) -> Values:
    total = 0
    for datum, value in enumerate(frame.columns[source].tolist()):
        if not isfinite(value):
            raise NonFinite(
                f"column {source!r} is {value}, which has no hash.",
                remedy="Fix the loss that computes it, or reduce it otherwise.",
                datum=datum,
                field=source,
            )
        if value != int(value) or not 0 <= value < EXACT_INTEGERS:
            raise MetricError(
                f"column {source!r} is {value}, not a whole number from 0 to 2^53 - 1.",
                remedy="Return hashes as integers below 2^53.",
                datum=datum,
                field=source,
            )
        total += int(value)
    return (float(total % EXACT_INTEGERS),)


def _std(frame: Frame, source: str, weight: str | None) -> Values:
    assert weight is not None
    moments = frame.moments(source, weight)
    return () if moments is None else (moments.std,)


def _moment_sum(frame: Frame, source: str, weight: str | None) -> Values:
    assert weight is not None
    moments = frame.moments(source, weight)
    return (0.0,) if moments is None else (moments.total,)


def _moment_squares(frame: Frame, source: str, weight: str | None) -> Values:
    assert weight is not None
    moments = frame.moments(source, weight)
    return (0.0,) if moments is None else (moments.squares,)


@dataclass(frozen=True)
class Reduction:
    """One way to reduce a column. `weighted`: needs a weight; `sdk`: the Tinker SDK knows the suffix;
    `moments`: the source is the prefix of the columns `<source>_mean` and `<source>_m2`."""

    apply: Callable[[Frame, str, str | None], Values]
    help: str
    weighted: bool = False
    sdk: bool = True
    moments: bool = False

    def columns(self, source: str) -> tuple[str, ...]:
        """The worker columns that `source` names."""
        return (f"{source}_mean", f"{source}_m2") if self.moments else (source,)


REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(_sum, "sum over datums"),
    "mean": Reduction(_mean, "sum(source) / sum(weight); absent when the weights sum to 0", weighted=True),
    "min": Reduction(_min, "smallest; datums of weight 0 take no part"),
    "max": Reduction(_max, "largest; datums of weight 0 take no part"),
    "std": Reduction(
        _std, "population standard deviation, from merged moments", weighted=True, sdk=False, moments=True
    ),
    "last": Reduction(_last, "value of the last datum, or of the command", sdk=False),
    "slack": Reduction(
        _slack,
        "the command's own mean (by weight, or by datums); the SDK makes of it the largest chunk's minus their mean",
    ),
    "unique": Reduction(_unique, "each value that differs, in datum order: `:unique`, `:unique_1`, ..."),
    "hash2": Reduction(_hash2, "sum of whole numbers modulo 2^53, independent of order"),
}
"""What a declaration may name."""

COMPANIONS: dict[str, Reduction] = {
    **REDUCTIONS,
    "moment_sum": Reduction(_moment_sum, "sum, from moments", weighted=True, moments=True),
    "moment_squares": Reduction(_moment_squares, "sum of squares, from moments", weighted=True, moments=True),
}
"""Those and what is published beside a metric so that chunks can be combined."""

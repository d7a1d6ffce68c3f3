"""Mergeable moments: count, mean and sum of squared deviations (m2) of values seen in separate datums."""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum, nan, sqrt

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]
"""One value a datum, float64 [datums]."""


def exact_sum(values: list[float]) -> float:
    """The correctly rounded sum, whatever the order; NaN and infinities stay what IEEE addition makes of them."""
    try:
        return fsum(values)
    except ValueError:  # inf and -inf met
        return nan
    except OverflowError:  # finite values beyond the range of a double
        return sum(values)


@dataclass(frozen=True)
class Moments:
    """count values with this mean; m2 is the sum of (value - mean)^2."""

    count: float
    mean: float
    m2: float

    @property
    def total(self) -> float:
        """Sum of the values."""
        return self.count * self.mean

    @property
    def squares(self) -> float:
        """Sum of the squared values: adds up over chunks, which m2 does not."""
        return self.m2 + self.count * self.mean * self.mean

    @property
    def std(self) -> float:
        """Population standard deviation (divisor: count)."""
        variance = self.m2 / self.count
        return sqrt(variance) if variance >= 0 else nan


def merge(count: Column, mean: Column, m2: Column) -> Moments | None:
    """The moments of all datums together, from each datum's own [datums]; None when no datum has a value.

    The k-way form of Chan, Golub and LeVeque's pairwise update (1979): m2 = sum(m2_i) + sum(n_i (mean_i - mean)^2).
    Both sums are correctly rounded and the deviations are taken from the final mean, so nothing cancels and the
    order of the datums does not matter. Datums of count 0 take no part.
    """
    count, mean, m2 = np.broadcast_arrays(count, mean, m2)
    takes_part = count != 0
    count, mean, m2 = count[takes_part], mean[takes_part], m2[takes_part]
    total = exact_sum(count.tolist())
    if total == 0:
        return None
    with np.errstate(all="ignore"):  # a value that is not finite stays so and is flagged where it is published
        centre = exact_sum((count * mean).tolist()) / total
        between = count * (mean - centre) ** 2
    return Moments(total, centre, exact_sum(m2.tolist() + between.tolist()))

"""Rows of all ranks come back in datum order, or an error says which datum or column does not fit."""

from __future__ import annotations

import numpy as np
import pytest

from tinsmith.actors.metrics import rows_in_order
from tinsmith.bus.protocol.errors import MetricError


def test_rows_come_back_in_datum_order_whatever_rank_made_them() -> None:
    parts = [([2, 0], {"loss": [2.0, 0.0]}), ([], {}), ([3], {"loss": np.array([3.0])}), ([1], {"loss": [1.0]})]
    for order in (parts, parts[::-1]):
        assert rows_in_order(order, 4)["loss"].tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("order", [1, -1])
def test_a_column_present_on_some_ranks_only_is_an_error(order: int) -> None:
    parts = [([0], {"loss": [1.0]}), ([1], {"loss": [1.0], "extra": [2.0]})]
    with pytest.raises(MetricError, match="column 'extra' is there for datum 1 but not for datum 0") as caught:
        rows_in_order(parts[::order], 2)
    assert caught.value.field == "extra"


def test_a_datum_that_is_missing_or_twice_is_an_error() -> None:
    with pytest.raises(MetricError, match=r"of 3 datums, \[1\] came from no rank") as caught:
        rows_in_order([([0, 2], {"loss": [1.0, 2.0]})], 3)
    assert caught.value.datum == 1
    with pytest.raises(MetricError, match="1 came more than once"):
        rows_in_order([([0, 1], {"loss": [1.0, 2.0]}), ([1], {"loss": [2.0]})], 2)
    with pytest.raises(MetricError, match="datum 5 of a batch of 2"):
        rows_in_order([([5], {"loss": [1.0]})], 2)
    with pytest.raises(MetricError, match=r"shape \(1,\) for 2 datums"):
        rows_in_order([([0, 1], {"loss": [1.0]})], 2)

"""Rows: what ranks return for their datums, put back into datum order for the catalogue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tinsmith.actors.metrics.moments import Column
from tinsmith.bus.protocol.errors import MetricError

RankRows = tuple[Sequence[int], Mapping[str, npt.ArrayLike]]
"""Indices of datums [n], and column -> one value for each of them [n]."""


def rows_in_order(parts: Iterable[RankRows], datums: int) -> dict[str, Column]:
    """column -> float64 [datums] in datum order, from the parts of any ranks and micro-batches in any order.

    A part without datums has no say. Raises MetricError when a datum is missing or came twice, or when a column is
    there for some datums only: a gap is never filled.
    """
    rows: dict[str, Column] = {}
    places: list[int] = []
    for indices, columns in parts:
        if not len(indices):
            continue
        if not places:
            rows = {name: np.empty(datums, dtype=np.float64) for name in columns}
        _check_names(rows, columns, indices[0], places)
        _check_places(indices, datums)
        places.extend(indices)
        for name, values in columns.items():
            column = np.asarray(values, dtype=np.float64)
            if column.shape != (len(indices),):
                raise MetricError(
                    f"column {name!r} has shape {column.shape} for {len(indices)} datums.",
                    remedy="Return one value a datum.",
                    datum=indices[0],
                    field=name,
                )
            rows[name][list(indices)] = column
    if len(places) != datums or len(set(places)) != datums:
        missing, twice = sorted(set(range(datums)) - set(places)), len(places) - len(set(places))
        raise MetricError(
            f"of {datums} datums, {missing or 'none'} came from no rank and {twice} came more than once.",
            remedy="Every datum must be computed by exactly one rank: compare the plan with what the ranks returned.",
            datum=missing[0] if missing else None,
        )
    return rows


def _check_names(rows: Mapping[str, Column], columns: Mapping[str, object], datum: int, before: Sequence[int]) -> None:
    if rows.keys() != columns.keys():
        differing = sorted(rows.keys() ^ columns.keys())
        raise MetricError(
            f"column {differing[0]!r} is there for datum {datum if differing[0] in columns else before[0]} "
            f"but not for datum {before[0] if differing[0] in columns else datum}.",
            remedy="Return every column for every datum, with the reduction's identity where nothing was seen.",
            datum=datum,
            field=differing[0],
        )


def _check_places(indices: Sequence[int], datums: int) -> None:
    for index in indices:
        if not 0 <= index < datums:
            raise MetricError(
                f"a rank returned datum {index} of a batch of {datums}.",
                remedy="Compare the plan with what the ranks returned.",
                datum=index,
            )

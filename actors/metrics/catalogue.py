"""Catalogue: the metrics of this service, fixed at start, and the one place where columns become metrics.

Invariants: a metric that can't be computed is absent, never 0; a value that is not finite is published as it is and
flagged, or fails the command, never replaced; a column that no metric reads is counted, never lost without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tinsmith.actors.metrics.declaration import METRIC_KINDS
from tinsmith.actors.metrics.moments import Column
from tinsmith.actors.metrics.outputs import Output, outputs_of
from tinsmith.actors.metrics.overlay import Declared, read_all
from tinsmith.actors.metrics.reductions import Frame
from tinsmith.bus.protocol.envelope import Kind
from tinsmith.bus.protocol.errors import MetricError, NonFinite


@dataclass(frozen=True)
class Reduced:
    """The metrics of one command; `flags` are the keys that are not finite, `unmapped` the columns no metric reads."""

    metrics: dict[str, float]
    flags: tuple[str, ...]
    unmapped: tuple[str, ...]


@dataclass(frozen=True)
class _Program:
    """The outputs that can be computed from one set of columns, each with the source column that is there."""

    steps: tuple[tuple[Output, str], ...]
    missing: tuple[Output, ...]
    unmapped: tuple[str, ...]


class Catalogue:
    """Validated declarations and the reducer over them; build it with `load`. One thread at a time."""

    def __init__(self, declared: Sequence[Declared]) -> None:
        self.declarations = tuple(each.declaration for each in declared)
        self.outputs = {kind: tuple(outputs_of(declared, kind)) for kind in METRIC_KINDS}
        self.unmapped: Counter[str] = Counter()
        """Worker column that no metric reads -> commands that carried it."""
        self.non_finite: Counter[str] = Counter()
        """Key of a metric -> values that were NaN or infinite."""
        self._programs: dict[tuple[Kind, frozenset[str]], _Program] = {}

    @staticmethod
    def load(overlays: Sequence[Path] = ()) -> Catalogue:
        """The built-in catalogue with the operator's overlays applied in order.

        Raises InvalidCatalogue that names the file, the entry and the remedy.
        """
        return Catalogue(read_all(overlays))

    def reduce(
        self, kind: Kind, rows: Mapping[str, npt.ArrayLike], scalars: Mapping[str, float] | None = None
    ) -> Reduced:
        """The metrics of one command.

        rows: worker column -> one value a datum, float64 [datums], in datum order. scalars: column -> the one value of
        the whole command. Raises MetricError for columns that don't fit, NonFinite for a metric declared `fail`.
        """
        columns = _columns(rows, scalars or {})
        program = self._program(kind, frozenset(columns))
        self.unmapped.update(program.unmapped)
        if program.missing:
            output = program.missing[0]
            raise MetricError(
                f"metric {output.key!r} must not be missing, but {kind.value} gave none of its columns "
                f"{sorted(set(output.columns()))}.",
                remedy="Return the column from the loss, or declare missing = 'omit'.",
                field=output.key,
            )
        frame = Frame(columns)
        metrics: dict[str, float] = {}
        flags: list[str] = []
        refused: Output | None = None
        for output, source in program.steps:
            for index, value in enumerate(output.reduction.apply(frame, source, output.weight)):
                key = f"{output.key}_{index}" if index else output.key
                metrics[key] = value
                if not isfinite(value):
                    flags.append(key)
                    self.non_finite[output.key] += 1
                    refused = output if output.must_be_finite and refused is None else refused
        if refused is not None:
            raise NonFinite(
                f"metric {refused.key!r} is {metrics[refused.key]} and is declared non_finite = 'fail'.",
                remedy="Look at the batch that caused it, or declare non_finite = 'publish'.",
                field=refused.key,
            )
        return Reduced(metrics, tuple(flags), program.unmapped)

    def _program(self, kind: Kind, present: frozenset[str]) -> _Program:
        program = self._programs.get((kind, present))
        if program is None:
            program = self._programs[kind, present] = _compile(self.outputs.get(kind, ()), present)
        return program


def _compile(outputs: Sequence[Output], present: frozenset[str]) -> _Program:
    steps: list[tuple[Output, str]] = []
    missing: list[Output] = []
    for output in outputs:
        source = next((name for name in output.source if present.issuperset(output.reduction.columns(name))), None)
        if source is not None and (output.weight is None or output.weight in present):
            steps.append((output, source))
        elif output.required:
            missing.append(output)
    mapped = {column for output in outputs for column in output.columns()}
    return _Program(tuple(steps), tuple(missing), tuple(sorted(present - mapped)))


def _columns(rows: Mapping[str, npt.ArrayLike], scalars: Mapping[str, float]) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    datums: int | None = None
    for name, values in rows.items():
        column = np.asarray(values, dtype=np.float64)
        if column.ndim != 1:
            raise MetricError(
                f"column {name!r} has shape {column.shape}.", remedy="Return one value a datum.", field=name
            )
        if datums is None:
            datums = len(column)
        elif len(column) != datums:
            raise MetricError(
                f"column {name!r} has {len(column)} values where {next(iter(rows))!r} has {datums}.",
                remedy="Return every column for every datum, with the reduction's identity where nothing was seen.",
                field=name,
            )
        columns[name] = column
    for name, value in scalars.items():
        if name in columns:
            raise MetricError(
                f"column {name!r} came both a value a datum and a value a command.",
                remedy="Rename one of the two.",
                field=name,
            )
        columns[name] = np.array([value], dtype=np.float64)
    return columns

"""Table: the catalogue for people - what is published, from which columns, and which columns nothing reads.

`python -m tinsmith.actors.metrics.table > ops/docs/metrics.md` writes the page of the built-in catalogue.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tinsmith.actors.metrics.catalogue import Catalogue
from tinsmith.actors.metrics.declaration import BATCH_KINDS
from tinsmith.actors.metrics.outputs import Output
from tinsmith.bus.protocol.envelope import Kind

_INTRODUCTION = """\
# Metrics

Generated from the catalogue: `python -m tinsmith.actors.metrics.table > ops/docs/metrics.md`.

Workers return one row of columns a datum; each metric below is reduced from them in datum order, as declared. A metric
that can't be computed for a command (its column is absent, or no token bears loss) is absent, never 0; a value that is
not finite is published as it is and flagged in the event.

Over several chunks the Tinker SDK adds `:sum`, takes the extremes of `:min` and `:max`, and weighs `:mean` by datums,
not by tokens. So the exact mean of several chunks is `x:sum` divided by the sum of its weight, and the exact standard
deviation is `sqrt(x_squares:sum / n - (x:sum / n)^2)` with `n` the sum of its weight. *Beside* marks keys that are
published for that purpose. A chunk in which no token bears loss has no mean, minimum or maximum, and the SDK drops a
key that any chunk lacks; sums and counts are in every chunk.
"""


@dataclass(frozen=True)
class Row:
    """One published key; `source` lists columns of which the first present is used, `beside` marks a companion."""

    key: str
    commands: tuple[str, ...]
    unit: str
    reduce: str
    source: str
    weight: str
    help: str
    beside: bool


@dataclass(frozen=True)
class ColumnUse:
    """A worker column and the keys that read it; none means that it is computed for nothing."""

    column: str
    keys: tuple[str, ...]


def describe(catalogue: Catalogue) -> list[Row]:
    """Every published key, keys of forward and forward_backward first."""
    seen: dict[Output, list[Kind]] = {}
    for kind, outputs in catalogue.outputs.items():
        for output in outputs:
            seen.setdefault(output, []).append(kind)
    return [
        Row(
            key=output.key,
            commands=tuple(kind.value for kind in kinds),
            unit=output.unit,
            reduce=output.apply.replace("moment_", "") if not output.declared else output.apply,
            source=" or ".join(", ".join(output.reduction.columns(name)) for name in output.source),
            weight=output.weight or "",
            help=output.help,
            beside=not output.declared,
        )
        for output, kinds in seen.items()
    ]


def columns(catalogue: Catalogue, produced: Iterable[str] = ()) -> list[ColumnUse]:
    """Worker columns by name: those that metrics read, those in `produced` (what workers are known to return), and
    those that came and no metric read."""
    uses: dict[str, dict[str, None]] = {column: {} for column in (*produced, *catalogue.unmapped)}
    for outputs in catalogue.outputs.values():
        for output in outputs:
            for column in output.columns():
                uses.setdefault(column, {})[output.key] = None
    return [ColumnUse(column, tuple(keys)) for column, keys in sorted(uses.items())]


def as_markdown(catalogue: Catalogue) -> str:
    """The catalogue as a page: keys of forward and forward_backward, of optim_step, and the columns behind them."""
    rows = describe(catalogue)
    batch = {kind.value for kind in BATCH_KINDS}
    parts = [
        _INTRODUCTION,
        "## forward and forward_backward\n",
        _keys([row for row in rows if batch.intersection(row.commands)]),
        "## optim_step\n",
        _keys([row for row in rows if Kind.OPTIM_STEP.value in row.commands]),
        "## Columns\n",
        _grid(
            ("column", "read by"),
            [(f"`{use.column}`", ", ".join(f"`{key}`" for key in use.keys) or "nothing") for use in columns(catalogue)],
        ),
    ]
    return "\n".join(parts)


def _keys(rows: list[Row]) -> str:
    return _grid(
        ("key", "unit", "reduced by", "source", "weight", "meaning"),
        [
            (
                f"`{row.key}`",
                row.unit,
                row.reduce,
                row.source,
                row.weight,
                f"*Beside.* {row.help}" if row.beside else row.help,
            )
            for row in rows
        ],
    )


def _grid(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(as_markdown(Catalogue.load()), end="")

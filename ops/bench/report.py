"""The report of a run: a table on a terminal, one plain line a row elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tinsmith.ops.bench.row import Row, show


def print_report(rows: Sequence[Row], console: Console) -> None:
    """All rows, and how busy the machine was: numbers of a busy one say little by themselves, ratios more."""
    if console.is_terminal:
        console.print(_table(rows))
    else:
        for row in rows:
            print(row.line)
    missed = sum(row.ok is False for row in rows)
    loads = " ".join(f"{load:.1f}" for load in os.getloadavg())
    print(f"{len(rows)} rows, {missed} targets missed; {os.cpu_count()} cores, load average {loads}", flush=True)


def _table(rows: Sequence[Row]) -> Table:
    table = Table("benchmark", title="tinsmith bench")
    for name in ("ours", "reference", "ratio"):
        table.add_column(name, justify="right")
    for name in ("unit", "target", "", "note"):
        table.add_column(name)
    for row in rows:
        table.add_row(
            row.name,
            show(row.ours),
            "" if row.reference is None else show(row.reference),
            "" if row.ratio is None else f"{row.ratio:.3f}",
            row.unit,
            row.target,
            f"[bold {'red' if row.ok is False else 'green'}]{row.verdict}[/]" if row.verdict else "",
            row.note,
        )
    return table

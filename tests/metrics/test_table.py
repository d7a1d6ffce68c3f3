"""The page of metrics is written by the catalogue, so it can't be out of date."""

from __future__ import annotations

from pathlib import Path

from tinsmith.actors.metrics import Catalogue
from tinsmith.actors.metrics.table import as_markdown, columns, describe
from tinsmith.bus.protocol.envelope import Kind


def test_the_page_of_metrics_is_current(builtin: Catalogue) -> None:
    page = (Path(__file__).parents[2] / "ops" / "docs" / "metrics.md").read_text()
    assert page == as_markdown(builtin), "run: python -m tinsmith.actors.metrics.table > ops/docs/metrics.md"


def test_every_key_is_described_once_with_its_unit_and_meaning(builtin: Catalogue) -> None:
    rows = describe(builtin)
    keys = [row.key for row in rows]
    assert len(set(keys)) == len(keys)
    assert set(keys) == {output.key for outputs in builtin.outputs.values() for output in outputs}
    assert all(row.unit and row.help and row.source for row in rows)
    std = next(row for row in rows if row.key == "logprob_gap:std")
    assert std.source == "logprob_gap_mean, logprob_gap_m2"
    assert "SDK drops" in std.help
    assert next(row for row in rows if row.key == "ratio:mean").weight == "num_tokens"


def test_a_column_that_nothing_reads_is_listed_as_such() -> None:
    catalogue = Catalogue.load()
    catalogue.reduce(Kind.FORWARD, {"stray": [1.0]})
    uses = {use.column: use.keys for use in columns(catalogue, produced=["loss", "my_column"])}
    assert uses["stray"] == uses["my_column"] == ()
    assert uses["loss"] == ("loss:sum", "loss:mean", "total_loss:sum")
    assert "| `stray` | nothing |" in as_markdown(catalogue)

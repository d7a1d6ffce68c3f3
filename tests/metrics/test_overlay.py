"""A catalogue is right when the service starts, or the service does not start and says which entry to correct."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tinsmith.actors.metrics import Catalogue
from tinsmith.bus.protocol.envelope import Kind
from tinsmith.bus.protocol.errors import InvalidCatalogue

FB = Kind.FORWARD_BACKWARD
Write = Callable[..., Path]


def _metrics(catalogue: Catalogue) -> dict[str, float]:
    return catalogue.reduce(FB, {"loss": [1.0, 2.0], "num_tokens": [3.0, 3.0], "reward": [5.0, 7.0]}).metrics


def test_an_overlay_adds_a_metric_without_other_code(overlay: Write) -> None:
    text = '[reward]\nreduce = ["sum", "max"]\nsource = "reward"\nunit = "points"\nhelp = "Reward."\n'
    metrics = _metrics(Catalogue.load([overlay(text)]))
    assert (metrics["reward:sum"], metrics["reward:max"]) == (12.0, 7.0)
    assert metrics["loss:sum"] == 3.0


def test_an_overlay_overrides_renames_and_disables(overlay: Write) -> None:
    text = (
        '[total_loss]\noverride = true\nreduce = "max"\nsource = "loss"\n'
        '[loss]\nrename = "objective"\n[num_tokens]\ndisable = true\n[entropy]\ndisable = true\n'
    )
    metrics = _metrics(Catalogue.load([overlay(text)]))
    # The count stays, beside the mean that it divides.
    assert metrics == {"total_loss:max": 2.0, "objective:sum": 3.0, "objective:mean": 0.5, "num_tokens:sum": 6.0}


def test_overlays_apply_in_order(overlay: Write) -> None:
    first = overlay('[reward]\nreduce = "sum"\nsource = "reward"\n', "first.toml")
    second = overlay('[reward]\nrename = "score"\n', "second.toml")
    assert _metrics(Catalogue.load([first, second]))["score:sum"] == 12.0
    with pytest.raises(InvalidCatalogue, match=r"second.toml, entry \[reward\].*nothing of that name"):
        Catalogue.load([second, first])


def test_a_metric_of_a_step_and_of_a_batch_has_the_key_that_each_needs(overlay: Write) -> None:
    text = '[seconds]\nreduce = "last"\nsource = "seconds"\ncommands = ["forward", "optim_step"]\n'
    catalogue = Catalogue.load([overlay(text)])
    assert catalogue.reduce(Kind.OPTIM_STEP, {}, {"seconds": 2.0}).metrics == {"seconds": 2.0}
    assert catalogue.reduce(Kind.FORWARD, {}, {"seconds": 2.0}).metrics == {
        "seconds:last": 2.0,
        "seconds_last:unique": 2.0,
    }
    assert catalogue.reduce(FB, {}, {"seconds": 2.0}).unmapped == ("seconds",)


REFUSED = {
    "unknown reduction": ('[x]\nreduce = "median"\nsource = "a"', r"entry \[x\]: unknown reduction 'median'"),
    "unknown field": ('[x]\nreduce = "sum"\nsource = "a"\nunits = "s"', r"entry \[x\]: unknown field 'units'"),
    "missing source": ('[x]\nreduce = "sum"', r"entry \[x\]: the field 'source' is missing"),
    "missing reduce": ('[x]\nsource = "a"', r"entry \[x\]: the field 'reduce' is missing"),
    "empty source": ('[x]\nreduce = "sum"\nsource = []', r"entry \[x\]: source"),
    "empty reduce": ('[x]\nreduce = []\nsource = "a"', r"entry \[x\]: reduce"),
    "no weight": ('[x]\nreduce = "mean"\nsource = "a"', r"entry \[x\]: reduce = 'mean' needs a weight"),
    "no count": ('[x]\nreduce = "std"\nsource = "a"', r"entry \[x\]: reduce = 'std' needs a weight"),
    "a colon": ('["x:y"]\nreduce = "sum"\nsource = "a"', r"entry \[x:y\]: the name 'x:y' has a colon"),
    "a colon by renaming": ('[loss]\nrename = "a:b"', r"entry \[a:b\].*colon"),
    "a blank": ('["x y"]\nreduce = "sum"\nsource = "a"', r"entry \[x y\]: the name 'x y' must start"),
    "twice in a file": ('[x]\nreduce="sum"\nsource="a"\n[x]\nreduce="sum"\nsource="b"', r"Cannot declare.*'x'"),
    "already declared": ('[loss]\nreduce="sum"\nsource="a"', r"entry \[loss\]: is already declared in builtin.toml"),
    "override of nothing": ('[x]\noverride=true\nreduce="sum"\nsource="a"', r"entry \[x\]: override: nothing"),
    "override false": ('[loss]\noverride=false\nreduce="sum"\nsource="a"', r"entry \[loss\]: override must be true"),
    "disable of nothing": ("[x]\ndisable=true", r"entry \[x\]: disable: nothing"),
    "disable with more": ('[loss]\ndisable=true\nunit="s"', r"entry \[loss\]: disable stands alone"),
    "rename to a taken name": ('[loss]\nrename="ratio"', r"entry \[loss\]: rename: 'ratio' is already declared"),
    "rename to a number": ("[loss]\nrename=3", r"entry \[loss\]: rename must be a string"),
    "two changes": ("[loss]\noverride=true\ndisable=true", r"entry \[loss\]: has both override and disable"),
    "a bare value": ('x = "sum"', r"entry \[x\]: is not a table"),
    "not TOML": ("[x", r"is not valid TOML"),
    "a command without metrics": (
        '[x]\nreduce="sum"\nsource="a"\ncommands="sample"',
        r"entry \[x\]: sample has no metrics",
    ),
    "an unknown command": ('[x]\nreduce="sum"\nsource="a"\ncommands="train"', r"entry \[x\]: commands"),
    "an unknown policy": ('[x]\nreduce="sum"\nsource="a"\nmissing="zero"', r"entry \[x\]: missing"),
    "a non-finite policy of replacement": (
        '[x]\nreduce="sum"\nsource="a"\nnon_finite="zero"',
        r"entry \[x\]: non_finite",
    ),
    "reduction named twice": ('[x]\nreduce=["sum","sum"]\nsource="a"', r"entry \[x\]: a reduction is named twice"),
    "a source for no reduction": (
        '[x]\nreduce=["sum"]\nsource={max="a"}',
        r"entry \[x\]: source must name columns for exactly \['sum'\]",
    ),
    "one bare key for two reductions": (
        '[x]\nreduce=["min","max"]\nsource="a"\ncommands="optim_step"',
        r"entry \[x\]: optim_step publishes the bare name",
    ),
    "sum that is not what the mean divides": (
        '[x]\nreduce=["sum","mean"]\nsource={sum="a",mean="b"}\nweight="n"',
        r"entry \[x\]: sum and mean must have the same source",
    ),
    "hash that the SDK would raise on": ('[x]\nreduce="hash2"\nsource="a"', r"entry \[x\]: hash2"),
    "a count under a declared key": (
        '[x]\nreduce="mean"\nsource="a"\nweight="ratio"\n[total_tokens]\nreduce="mean"\nsource="b"\nweight="pg_loss"\n'
        '[pg_loss]\noverride=true\nreduce="sum"\nsource="other"',
        r"entry \[x\]: publishes beside itself the key 'ratio:sum'",
    ),
    "a squares key under a declared one": (
        '[x_squares]\nreduce="sum"\nsource="b"\n[x]\nreduce="std"\nsource="a"\nweight="n"',
        r"entry \[x\]: publishes beside itself the key 'x_squares:sum', which \[x_squares\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_entry_is_refused_at_start_by_file_and_name(overlay: Write, case: str) -> None:
    text, message = REFUSED[case]
    with pytest.raises(InvalidCatalogue, match=message) as caught:
        Catalogue.load([overlay(text)])
    assert "overlay.toml" in str(caught.value)
    assert caught.value.remedy


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidCatalogue, match=r"absent.toml: can't be read"):
        Catalogue.load([tmp_path / "absent.toml"])
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidCatalogue, match=r"bytes.toml: is not UTF-8"):
        Catalogue.load([tmp_path / "bytes.toml"])

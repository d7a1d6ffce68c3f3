"""Row: one measured number beside its reference, and the target that both are held to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Row:
    """`ours` and `reference` in `unit`; `ratio` is ours / reference. `ok` is None where there is no target."""

    name: str
    ours: float
    unit: str
    reference: float | None = None
    ratio: float | None = None
    target: str = ""
    ok: bool | None = None
    note: str = ""
    """What the reference is, and what else a reader must know of the number."""

    @property
    def verdict(self) -> str:
        """ok, MISSED, or nothing without a target."""
        return {True: "ok", False: "MISSED", None: ""}[self.ok]

    @property
    def line(self) -> str:
        """The row as one plain line."""
        parts = [f"{self.name}: {show(self.ours)} {self.unit}"]
        if self.reference is not None:
            parts.append(f"reference {show(self.reference)} {self.unit}")
        if self.ratio is not None:
            parts.append(f"ratio {self.ratio:.3f}")
        if self.target:
            parts.append(f"target {self.target}: {self.verdict}")
        return ", ".join(parts) + (f" ({self.note})" if self.note else "")


def show(value: float) -> str:
    """About four digits, never in powers of ten."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def at_most(name: str, ours: float, limit: float, unit: str, note: str = "") -> Row:
    """A row without a reference whose target is an upper limit in its own unit."""
    return Row(name, ours, unit, target=f"<= {limit:g} {unit}", ok=ours <= limit, note=note)


def at_least(name: str, ours: float, limit: float, unit: str, note: str = "", *, reference: float | None = None) -> Row:
    """A row whose target is a lower limit in its own unit; a reference only explains it."""
    ratio = ours / reference if reference is not None else None
    return Row(name, ours, unit, reference, ratio, f">= {limit:g} {unit}", ours >= limit, note)


def slower_by(name: str, ours: float, reference: float, limit: float, unit: str, note: str = "") -> Row:
    """A row of costs: ours may be `limit` times the reference."""
    ratio = ours / reference
    return Row(name, ours, unit, reference, ratio, f"<= {limit:g}x", ratio <= limit, note)


def faster_by(
    name: str, ours: Sequence[float], reference: Sequence[float], limit: float, unit: str, note: str = ""
) -> Row:
    """A row of speeds measured in turns [rounds]: the median of the rounds' ratios must reach `limit`.

    Two measurements of one round are neighbours in time, so what slows the whole machine slows both of them.
    """
    ratios = [mine / other for mine, other in zip(ours, reference, strict=True)]
    spread = f"rounds {min(ratios):.2f} to {max(ratios):.2f}"
    ratio = median(ratios)
    note = f"{note}; {spread}" if note else spread
    return Row(name, median(ours), unit, median(reference), ratio, f">= {limit:g}x", ratio >= limit, note)


def seconds_of(work: Callable[[], object]) -> float:
    """How long one call takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun

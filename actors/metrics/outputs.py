"""Outputs: the keys that the declarations publish for a kind of command, and what each is computed from.

Invariants: a key is published by one source only; keys of forward and forward_backward have exactly one colon; and
whatever the Tinker SDK can't combine over chunks is accompanied by keys that it can:
- `x:mean` (the SDK weighs it by datums) by `x:sum` and `<weight>:sum`, whose quotient is the mean;
- `x:std` by `x:sum`, `x_squares:sum` and `<weight>:sum`;
- `x:std` and `x:last` (suffixes the SDK drops) by `x_std:unique` and `x_last:unique`, which it lists chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tinsmith.actors.metrics.declaration import BATCH_KINDS, Declaration, invalid
from tinsmith.actors.metrics.overlay import Declared
from tinsmith.actors.metrics.reductions import COMPANIONS, REDUCTIONS, Reduction
from tinsmith.bus.protocol.envelope import Kind


@dataclass(frozen=True)
class Output:
    """One published key. `apply` names an entry of COMPANIONS; `declared` is false for a companion."""

    key: str
    metric: str
    apply: str
    source: tuple[str, ...]
    weight: str | None
    unit: str
    help: str
    declared: bool
    required: bool
    must_be_finite: bool

    @property
    def reduction(self) -> Reduction:
        """How the source becomes the value."""
        return COMPANIONS[self.apply]

    def columns(self) -> Iterator[str]:
        """Every worker column that this key may read."""
        for source in self.source:
            yield from self.reduction.columns(source)
        if self.weight is not None:
            yield self.weight

    def computes_like(self, other: Output) -> bool:
        """Whether both have the same value whatever the columns hold."""
        return (self.apply, self.source, self.weight) == (other.apply, other.source, other.weight)


def outputs_of(declared: Sequence[Declared], kind: Kind) -> list[Output]:
    """The outputs for `kind`, declared ones first in their order, then companions.

    Raises InvalidCatalogue when two declarations, or a declaration and another's companion, claim one key.
    """
    relevant = [each for each in declared if kind in each.declaration.commands]
    claims: dict[str, tuple[Output, Declared]] = {}
    for each in relevant:
        for output in _declared(each.declaration, kind):
            _claim(claims, output, each)
    if kind in BATCH_KINDS:
        for each in relevant:
            for output in _companions(each.declaration):
                _claim(claims, output, each)
    return [output for output, _ in claims.values()]


def _claim(claims: dict[str, tuple[Output, Declared]], output: Output, by: Declared) -> None:
    if output.key not in claims:
        claims[output.key] = (output, by)
        return
    first, owner = claims[output.key]
    if output.declared or not _same(first, output):
        what = "publishes" if output.declared else "publishes beside itself"
        raise invalid(
            by.file,
            by.entry,
            f"{what} the key {output.key!r}, which [{owner.entry}] of {owner.file} computes otherwise",
            "Rename one of the two, or give both the same source.",
        )


def _same(first: Output, second: Output) -> bool:
    # A sum of moments stands in for the sum of the mean's own column: both are the sum over the same tokens.
    own_sum = first.metric == second.metric and second.apply == "moment_sum"
    return first.computes_like(second) or own_sum


def _declared(declaration: Declaration, kind: Kind) -> Iterator[Output]:
    for reduction in declaration.reduce:
        help_text = declaration.help
        if kind in BATCH_KINDS and not REDUCTIONS[reduction].sdk:
            help_text = f"{help_text} The Tinker SDK drops `:{reduction}`: see {declaration.name}_{reduction}:unique."
        yield Output(
            key=f"{declaration.name}:{reduction}" if kind in BATCH_KINDS else declaration.name,
            metric=declaration.name,
            apply=reduction,
            source=declaration.source[reduction],
            # A sum is over all datums: its weight is only what the mean beside it divides by.
            weight=None if reduction in ("sum", "hash2") else declaration.weight,
            unit=declaration.unit,
            help=help_text.strip(),
            declared=True,
            required=declaration.missing == "error",
            must_be_finite=declaration.non_finite == "fail",
        )


def _companions(declaration: Declaration) -> Iterator[Output]:
    name, weight = declaration.name, declaration.weight

    def companion(key: str, apply: str, source: tuple[str, ...], weight: str | None, unit: str, text: str) -> Output:
        return Output(key, key.partition(":")[0], apply, source, weight, unit, text, False, False, False)

    for reduction in ("mean", "slack", "std"):
        if reduction not in declaration.source or weight is None:
            continue
        source = declaration.source[reduction]
        if reduction == "std":
            text = f"Sum of {name} over `{weight}`."
            yield companion(f"{name}:sum", "moment_sum", source, weight, declaration.unit, text)
            text = f"Sum of squares of {name}: with {name}:sum and {weight}:sum it gives the std of several chunks."
            yield companion(f"{name}_squares:sum", "moment_squares", source, weight, f"{declaration.unit}^2", text)
        else:
            yield companion(f"{name}:sum", "sum", source, None, declaration.unit, f"Numerator of {name}:{reduction}.")
        yield companion(f"{weight}:sum", "sum", (weight,), None, weight, f"Denominator of {name}:{reduction}.")
    for reduction in declaration.reduce:
        if not REDUCTIONS[reduction].sdk:
            source = declaration.source[reduction]
            text = f"{name}:{reduction} where the SDK sees it, a value a chunk."
            yield companion(f"{name}_{reduction}:unique", reduction, source, weight, declaration.unit, text)

"""Declaration: what a metric is, checked when it is read from TOML and never guessed from its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tinsmith.actors.metrics.reductions import REDUCTIONS
from tinsmith.bus.protocol.envelope import Kind
from tinsmith.bus.protocol.errors import InvalidCatalogue

BATCH_KINDS = (Kind.FORWARD, Kind.FORWARD_BACKWARD)
"""Kinds whose keys are `name:reduction`; the others publish the bare name."""

METRIC_KINDS = (*BATCH_KINDS, Kind.OPTIM_STEP)
"""Kinds that have metrics."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _check_name(name: str) -> str:
    if ":" in name:
        raise ValueError(f"the name {name!r} has a colon, and a published key must have exactly one")
    if not _NAME.fullmatch(name):
        raise ValueError(f"the name {name!r} must start with a letter and hold letters, digits and _ . / - only")
    return name


def _check_reduction(name: str) -> str:
    if name not in REDUCTIONS:
        raise ValueError(f"unknown reduction {name!r}; there are {', '.join(REDUCTIONS)}")
    return name


def _check_kind(kind: Kind) -> Kind:
    if kind not in METRIC_KINDS:
        raise ValueError(f"{kind.value} has no metrics; commands may be {', '.join(METRIC_KINDS)}")
    return kind


ColumnName = Annotated[str, Field(min_length=1)]
ColumnNames = Annotated[tuple[ColumnName, ...], BeforeValidator(_as_tuple), Field(min_length=1)]


class Declaration(BaseModel):
    """One metric: where it comes from, how it is reduced, what weighs it.

    source: reduction -> worker columns, of which the first present is used. In TOML a name or a list of names stands
    for all reductions, a table for one each. For `std` it is the prefix of the columns `<source>_mean`, `<source>_m2`.
    weight: column of denominators (mean, std), or of what tells the datums that take part (min, max, last, unique).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    reduce: Annotated[tuple[str, ...], BeforeValidator(_as_tuple), Field(min_length=1)]
    source: dict[str, ColumnNames]
    weight: ColumnName | None = None
    commands: Annotated[tuple[Kind, ...], BeforeValidator(_as_tuple), Field(min_length=1)] = BATCH_KINDS
    unit: str = ""
    help: str = ""
    missing: Literal["omit", "error"] = "omit"
    """When no source column is there: leave the metric out, or fail the command."""
    non_finite: Literal["publish", "fail"] = "publish"
    """When the value is NaN or infinite: publish it as it is and flag it, or fail the command."""

    @model_validator(mode="before")
    @classmethod
    def _spread_source(cls, fields: Any) -> Any:
        reduce, source = _as_tuple(fields.get("reduce", ())), fields.get("source")
        if source is None or isinstance(source, dict) or not isinstance(reduce, (list, tuple)):
            return fields
        return {**fields, "source": {name: source for name in reduce if isinstance(name, str)}}

    @model_validator(mode="after")
    def _is_consistent(self) -> Declaration:
        _check_name(self.name)
        for reduction in self.reduce:
            _check_reduction(reduction)
        if len(set(self.reduce)) != len(self.reduce):
            raise ValueError(f"a reduction is named twice in {list(self.reduce)}")
        if set(self.source) != set(self.reduce):
            raise ValueError(f"source must name columns for exactly {list(self.reduce)} (got {list(self.source)})")
        for kind in self.commands:
            _check_kind(kind)
        for reduction in self.reduce:
            if REDUCTIONS[reduction].weighted and self.weight is None:
                raise ValueError(f"reduce = {reduction!r} needs a weight: the column that counts what is averaged")
        if "hash2" in self.reduce and self.non_finite != "fail":
            raise ValueError("hash2 of a value that is not finite does not exist: set non_finite = 'fail'")
        if Kind.OPTIM_STEP in self.commands and len(self.reduce) > 1:
            raise ValueError(f"optim_step publishes the bare name, so {list(self.reduce)} would share one key")
        if "sum" in self.source and "mean" in self.source and self.source["sum"] != self.source["mean"]:
            raise ValueError("sum and mean must have the same source: the sum is what the mean divides")
        return self


_REMEDY = "An entry has {}.".format(
    ", ".join(name for name in Declaration.model_fields if name != "name") + "; only reduce and source are required"
)


def declare(file: str, name: str, fields: Mapping[str, Any]) -> Declaration:
    """The declaration of entry `name` of `file`.

    Raises InvalidCatalogue that names the file, the entry and the field.
    """
    try:
        return Declaration.model_validate({**fields, "name": name})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            fault = f"unknown field {field!r}"
        elif first["type"] == "missing":
            fault = f"the field {field!r} is missing"
        elif field:
            fault = f"{field}: {first['msg']} (got {first['input']!r})"
        else:
            fault = first["msg"].removeprefix("Value error, ")
        raise invalid(file, name, fault, _REMEDY, field=field or None) from None


def invalid(file: str, entry: str | None, fault: str, remedy: str, *, field: str | None = None) -> InvalidCatalogue:
    """The error of a catalogue, naming its file and entry."""
    place = f"{file}, entry [{entry}]" if entry else file
    return InvalidCatalogue(f"{place}: {fault}.", remedy=remedy, field=field)

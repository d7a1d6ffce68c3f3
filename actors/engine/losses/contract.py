"""What a loss is: typed per-token inputs in, a per-token loss and named per-datum columns out, and a declared config.

Invariants kept here and by every built-in loss:
- a loss is a pure function of its arguments, summed (never averaged) over tokens and datums;
- a masked or padded position takes no part, whatever it holds: values are replaced by `where` before any arithmetic,
  so that neither inf * 0 nor its gradient becomes NaN;
- a config is complete and checked before the function sees it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinsmith.bus.protocol.errors import InvalidLossConfig

Value = float | int | bool | str
Config = Mapping[str, Value]
"""A complete, checked config: every declared field is present."""

TARGETS = "target_tokens"
SAMPLER = "logprobs"
"""Input that holds the sampler's log-probs q; a loss that requires it gets the sampler columns."""


@dataclass(frozen=True)
class TokenInputs:
    """One micro-batch as a loss sees it; rows are datums, right-padded.

    logprobs [rows, L] or [rows, L, K]: log-probs of the targets, with gradient.
    entropy  [rows, L]: entropy of the model's distribution, nats.
    inputs   name -> [rows, L] or [rows, L, K]: the datums' own float inputs; a name that the batch lacks is absent.
    mask     bool [rows, L]: true where a token is, false where padding is.
    """

    logprobs: Tensor
    entropy: Tensor
    inputs: Mapping[str, Tensor]
    mask: Tensor

    def bearing(self, names: tuple[str, ...]) -> Tensor:
        """bool [rows, L]: valid tokens where the first present of these inputs is not 0 (any of K); none: all."""
        for name in names:
            if name in self.inputs:
                chosen = self.inputs[name] != 0
                return self.mask & (chosen.any(-1) if chosen.dim() == 3 else chosen)
        return self.mask


def keep(mask: Tensor, values: Tensor) -> Tensor:
    """`values` where mask, 0 elsewhere, with gradient 0 there; whatever is masked (inf, NaN) leaves no trace."""
    return torch.where(mask, values, torch.zeros_like(values))


@dataclass(frozen=True)
class LossOutput:
    """What a loss returns.

    per_token [rows, L]: the loss of each token in nats, with gradient; 0 where loss_mask is false.
    loss_mask bool [rows, L]: the tokens that bear loss; all common columns count these tokens only.
    columns   name -> [rows]: the loss's own columns, exactly those that `Loss.columns` declares.
    ratio     [rows, L]: the ratio that the loss used, where it is not exp(logprobs - sampler logprobs).
    clipped   bool [rows, L]: tokens whose objective the clip changed; None: this loss does not clip.
    """

    per_token: Tensor
    loss_mask: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    ratio: Tensor | None = None
    clipped: Tensor | None = None


@dataclass(frozen=True)
class ConfigField:
    """One declared config key: its type, inclusive range and default (None: the caller must give it)."""

    name: str
    type: type[float] | type[int] | type[bool] | type[str] = float
    default: Value | None = None
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()

    def describe(self) -> str:
        """For an error's remedy: `beta (float, 0 to inf, required)`."""
        limits = ""
        if self.type in (float, int):
            limits = f", {self.low:g} to {self.high:g}"
        elif self.choices:
            limits = f", one of {'|'.join(self.choices)}"
        default = "required" if self.default is None else f"default {self.default!r}"
        return f"{self.name} ({self.type.__name__}{limits}, {default})"

    def check(self, value: object) -> Value:
        """The value in the declared type; raises ValueError that says what is wrong."""
        if self.type is bool or self.type is str:
            if not isinstance(value, self.type):
                raise ValueError(f"must be {self.type.__name__}, got {value!r}")
            if self.choices and value not in self.choices:
                raise ValueError(f"must be one of {', '.join(self.choices)}, got {value!r}")
            return value
        # bool is an int in Python; true for a number is a mistake worth naming.
        allowed = (int,) if self.type is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise ValueError(f"must be {self.type.__name__}, got {value!r}")
        if not math.isfinite(value):
            raise ValueError(f"must be finite, got {value!r}")
        if not self.low <= value <= self.high:
            raise ValueError(f"must be within {self.low:g} to {self.high:g}, got {value!r}")
        return self.type(value)


@dataclass(frozen=True)
class Columnar:
    """All datums of a batch laid end to end, for checks that look at values: arrays [tokens] or [tokens, K]."""

    inputs: Mapping[str, npt.NDArray[Any]]
    bearing: npt.NDArray[np.bool_]
    """[tokens]: where loss is borne."""
    starts: npt.NDArray[np.intp]
    """[datums]: where each datum begins; none is empty."""

    def datum(self, position: int) -> int:
        """The datum that holds this position."""
        return int(np.searchsorted(self.starts, position, side="right")) - 1

    def offset(self, position: int) -> int:
        """This position counted from its datum's first token."""
        return position - int(self.starts[self.datum(position)])


@dataclass(frozen=True)
class BadValue:
    """What a loss's own check found: where, and the words of the error."""

    datum: int
    field: str
    message: str
    remedy: str


LossFunction = Callable[[TokenInputs, Config], LossOutput]
ValueCheck = Callable[[Columnar, Config], BadValue | None]


@dataclass(frozen=True)
class Loss:
    """A loss by name: its function, the inputs it takes beside target_tokens, its config and its own columns.

    required, optional: float inputs, one value a token (or [n, K] like the targets where `multi_target`).
    ignored:  input names that may be sent and have no effect; any other name is refused.
    bearing:  the first of these inputs that a batch has says which tokens bear loss (where it is not 0); none: all.
    averaging: inputs that mark (where not 0) further tokens whose log-probs are read, as for a mean over the sequence.
    columns:  names of the columns of its own that the function returns.
    low_high: pairs of config keys (also of per-token inputs of those names) whose first must not exceed the second.
    check:    a further check of values, over the whole batch, beyond lengths, types and finiteness.
    """

    name: str
    function: LossFunction
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    config: tuple[ConfigField, ...] = ()
    bearing: tuple[str, ...] = ()
    averaging: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    low_high: tuple[tuple[str, str], ...] = ()
    multi_target: bool = False
    check: ValueCheck | None = None

    @property
    def has_sampler(self) -> bool:
        """Whether every datum carries the sampler's log-probs, and so the ratio, KL and gap columns exist."""
        return SAMPLER in self.required

    def parse_config(self, given: Mapping[str, object]) -> dict[str, Value]:
        """The complete config: given values checked, defaults filled in.

        Raises InvalidLossConfig that names the key and lists what this loss takes.
        """
        fields = {item.name: item for item in self.config}
        takes = "; ".join(item.describe() for item in self.config) or "no config"
        for key in given:
            if key not in fields:
                raise self._refuse(key, "is not a config key of this loss", takes)
        parsed: dict[str, Value] = {}
        for key, item in fields.items():
            value = given.get(key, item.default)
            if value is None:
                raise self._refuse(key, "is required", takes)
            try:
                parsed[key] = item.check(value)
            except ValueError as error:
                raise self._refuse(key, str(error), takes) from None
        for low, high in self.low_high:
            if float(parsed[low]) > float(parsed[high]):
                raise self._refuse(low, f"{parsed[low]} exceeds {high} {parsed[high]}", takes)
        return parsed

    def _refuse(self, key: str, what: str, takes: str) -> InvalidLossConfig:
        return InvalidLossConfig(f"loss {self.name!r}: {key} {what}.", remedy=f"{self.name} takes: {takes}.", field=key)

"""The registry of losses, and the one place that runs a loss and makes its per-datum columns."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith.actors.engine.losses.builtin import BUILTIN
from tinsmith.actors.engine.losses.columns import COMMON_COLUMNS, datum_columns
from tinsmith.actors.engine.losses.contract import (
    TARGETS,
    BadValue,
    Columnar,
    Config,
    ConfigField,
    Loss,
    LossOutput,
    TokenInputs,
    Value,
    keep,
)
from tinsmith.bus.protocol.errors import CommandFailed, StartupError, UnknownLoss

__all__ = [
    "BadValue",
    "Columnar",
    "Config",
    "ConfigField",
    "Evaluation",
    "Loss",
    "LossOutput",
    "LossRegistry",
    "TokenInputs",
    "evaluate",
    "keep",
    "load_losses",
]

_NAME = re.compile(r"^[a-z][a-z0-9_]{0,63}$")


class LossRegistry:
    """Losses by name; built once at start, read ever after."""

    def __init__(self) -> None:
        self._losses: dict[str, Loss] = {}

    @classmethod
    def builtin(cls) -> LossRegistry:
        """A registry that holds the six built-in losses."""
        registry = cls()
        for loss in BUILTIN:
            registry.register(loss)
        return registry

    @property
    def names(self) -> tuple[str, ...]:
        """Registered names, sorted."""
        return tuple(sorted(self._losses))

    def register(self, loss: Loss) -> None:
        """Add a loss; raises StartupError where its declaration is wrong or its name is taken."""
        remedy = "mend the declaration of the loss and start again."
        if not _NAME.fullmatch(loss.name):
            raise StartupError(f"loss name {loss.name!r} is not of the form {_NAME.pattern}.", remedy=remedy)
        if loss.name in self._losses:
            raise StartupError(f"loss {loss.name!r} is registered twice.", remedy="give it another name.")
        keys = [item.name for item in loss.config]
        problems = {
            "declares an input in two roles": _repeated([TARGETS, *loss.required, *loss.optional, *loss.ignored]),
            "declares a config key twice": _repeated(keys),
            "declares a column twice": _repeated(list(loss.columns)),
            "declares a column that every loss already has": set(loss.columns) & COMMON_COLUMNS,
            "selects tokens by an input it does not take": set(loss.bearing) - {*loss.required, *loss.optional},
            "averages over an input it does not require": set(loss.averaging) - set(loss.required),
            "orders a config key it does not declare": {key for pair in loss.low_high for key in pair} - set(keys),
        }
        for problem, names in problems.items():
            if names:
                raise StartupError(f"loss {loss.name!r} {problem}: {', '.join(sorted(names))}.", remedy=remedy)
        for item in loss.config:
            if item.default is not None:
                try:
                    item.check(item.default)
                except ValueError as error:
                    raise StartupError(f"loss {loss.name!r}: default of {item.name} {error}.", remedy=remedy) from None
        self._losses[loss.name] = loss

    def get(self, name: str) -> Loss:
        """The loss of that name; raises UnknownLoss that lists the registered ones."""
        if name not in self._losses:
            raise UnknownLoss(
                f"no loss is named {name!r}.", remedy=f"use one of: {', '.join(self.names)}.", field="loss"
            )
        return self._losses[name]

    def parse_config(self, name: str, given: Mapping[str, object]) -> dict[str, Value]:
        """The complete config of that loss; raises UnknownLoss or InvalidLossConfig."""
        return self.get(name).parse_config(given)


def load_losses(*modules: str) -> LossRegistry:
    """The built-in losses and those that each module's `register(registry)` adds, e.g. `my_package.my_losses`.

    Raises StartupError where a module can't be imported, has no `register`, or registers a wrong declaration.
    """
    registry = LossRegistry.builtin()
    for path in modules:
        remedy = "name an importable module with a function register(registry)."
        try:
            module = importlib.import_module(path)
        except Exception as error:
            raise StartupError(f"losses module {path!r} can't be imported: {error!r}.", remedy=remedy) from error
        register = getattr(module, "register", None)
        if not callable(register):
            raise StartupError(f"losses module {path!r} has no function `register`.", remedy=remedy)
        register(registry)
    return registry


@dataclass(frozen=True)
class Evaluation:
    """A loss over one micro-batch.

    total: float scalar with gradient, the sum over all tokens; connected to the graph even if no token bears loss,
    so that every rank takes part in the collectives of a backward pass.
    columns: name -> float64 [rows]; the same names for every micro-batch of a command.
    """

    total: Tensor
    columns: dict[str, Tensor]


def evaluate(loss: Loss, tokens: TokenInputs, config: Config) -> Evaluation:
    """Run the loss and make its columns; raises CommandFailed where a registered loss breaks its declaration."""
    output = loss.function(tokens, config)
    shape = tokens.mask.shape
    for what, value in (("per-token loss", output.per_token), ("loss mask", output.loss_mask)):
        if value.shape != shape:
            raise _broken(loss, f"returned a {what} of shape {list(value.shape)}, not {list(shape)}")
    if output.loss_mask.dtype != torch.bool:
        raise _broken(loss, f"returned a loss mask of {output.loss_mask.dtype}, not bool")
    if set(output.columns) != set(loss.columns):
        raise _broken(loss, f"returned columns {sorted(output.columns)}, not the declared {sorted(loss.columns)}")
    for name, column in output.columns.items():
        if column.shape != shape[:1]:
            raise _broken(loss, f"returned column {name!r} of shape {list(column.shape)}, not {[shape[0]]}")
    # A loss may mark fewer tokens than are valid, never padding.
    loss_mask = output.loss_mask & tokens.mask
    per_token = keep(loss_mask, output.per_token)
    columns = datum_columns(tokens, output, per_token, loss_mask, has_sampler=loss.has_sampler)
    columns.update({name: column.detach().double() for name, column in output.columns.items()})
    return Evaluation(per_token.sum(), columns)


def _broken(loss: Loss, what: str) -> CommandFailed:
    return CommandFailed(f"loss {loss.name!r} {what}.", remedy="mend the registered loss function.")


def _repeated(names: list[str]) -> set[str]:
    return {name for name in names if names.count(name) > 1}

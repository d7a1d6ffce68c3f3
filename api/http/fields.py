"""Typed fields of a JSON object that a client sent. Each raises InvalidInput that names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from tinsmith.bus.protocol.errors import InvalidInput

T = TypeVar("T")
_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def field(body: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """A field that must be there."""
    if body.get(name) is None:
        raise InvalidInput("the field is missing", field=name)
    return _checked(body[name], name, kind)


def optional(body: Mapping[str, Any], name: str, kind: type[T], default: T) -> T:
    """A field that may be absent or null."""
    return _checked(body[name], name, kind) if body.get(name) is not None else default


def maybe(body: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    """A field that may be absent or null; then None."""
    return _checked(body[name], name, kind) if body.get(name) is not None else None


def token_array(tokens: Sequence[int]) -> npt.NDArray[np.int32]:
    """Token ids as int32 [n]. Raises InvalidInput for one that no vocabulary holds."""
    for at, token in enumerate(tokens):
        if not 0 <= token < 2**31:
            raise InvalidInput(f"token {token} at position {at} is no token id", field="prompt")
    return np.asarray(tokens, np.int32)


def _checked(value: Any, name: str, kind: type[T]) -> T:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    try:
        # Strict about JSON's own types, save that 1 is a float too.
        checked: T = _ADAPTERS[kind].validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidInput(f"{first['msg']} (got {value!r})"[:300], field=name) from None
    return checked

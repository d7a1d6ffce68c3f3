"""Datum: one sequence with its per-token loss inputs, and the columnar body that carries many of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinsmith.bus.protocol.codec import Array, decode, encode, pack_ragged, unpack_ragged
from tinsmith.bus.protocol.errors import InvalidDatum, InvalidInput, ProtocolError

INTEGER_INPUTS = frozenset({"target_tokens"})
"""Loss inputs that are token ids, kept as int64; every other input is float32."""


@dataclass(frozen=True, eq=False)
class Datum:
    """One sequence as the model reads it, and what the loss needs at each of its tokens.

    tokens: int32 or int64 [n]. inputs: `target_tokens` int64 [n] or [n, K]; any other name float32 [n] or [n, K].
    Lists and other dtypes are converted when that loses nothing but float precision; anything else raises
    InvalidDatum that names the field. Whether the lengths fit together is the engine's to judge.
    """

    tokens: Any
    inputs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tokens = _integers("tokens", self.tokens, keep=(np.int32, np.int64))
        if tokens.ndim != 1:
            raise InvalidDatum(f"shape {list(tokens.shape)}, expected [tokens]", field="tokens")
        inputs = {}
        for name, value in self.inputs.items():
            if not isinstance(name, str) or not name:
                raise InvalidDatum(f"a loss input's name must be a string, not {name!r}", field="inputs")
            inputs[name] = _integers(name, value, (np.int64,)) if name in INTEGER_INPUTS else _floats(name, value)
            if inputs[name].ndim not in (1, 2):
                shape = list(inputs[name].shape)
                raise InvalidDatum(f"shape {shape}, expected [tokens] or [tokens, K]", field=name)
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "inputs", inputs)

    def __len__(self) -> int:
        return len(self.tokens)


def pack_datums(data: Sequence[Datum]) -> tuple[bytes, tuple[int, ...]]:
    """The body of a forward command and the number of tokens of each datum.

    Raises InvalidDatum (datum and field named) for what a column can't represent.
    """
    wide = any(datum.tokens.dtype == np.int64 for datum in data)
    tokens = [datum.tokens.astype(np.int64 if wide else np.int32, copy=False) for datum in data]
    names = sorted({name for datum in data for name in datum.inputs})
    columns = {}
    for name in names:
        try:
            columns[name] = pack_ragged([datum.inputs.get(name) for datum in data])
        except InvalidInput as error:
            raise InvalidDatum(error.message, remedy=error.remedy, datum=error.datum, field=name) from None
    return encode({"tokens": pack_ragged(tokens), "inputs": columns}), tuple(len(row) for row in tokens)


def unpack_datums(body: bytes | memoryview | Array) -> list[Datum]:
    """The datums of a body; their arrays are read-only views of it. Raises ProtocolError for any other body."""
    tree = decode(body)
    if not isinstance(tree, dict) or set(tree) != {"tokens", "inputs"} or not isinstance(tree["inputs"], dict):
        raise ProtocolError("the body holds no datums", remedy="Make it with tinsmith.bus.protocol.datum.pack_datums.")
    tokens = unpack_ragged(tree["tokens"])
    columns = {name: unpack_ragged(column) for name, column in tree["inputs"].items()}
    if any(row is None for row in tokens) or any(len(column) != len(tokens) for column in columns.values()):
        raise ProtocolError("the body's columns don't have one row for each datum")
    data = []
    for at, row in enumerate(tokens):
        inputs = {name: column[at] for name, column in columns.items() if column[at] is not None}
        try:
            data.append(Datum(row, inputs))
        except InvalidDatum as error:
            raise ProtocolError(error.message, datum=at, field=error.field) from None
    return data


def _array(name: str, value: Any) -> Array:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise InvalidDatum(f"not an array of numbers: {error}", field=name) from None
    if array.dtype.kind not in "biuf":
        raise InvalidDatum(f"not an array of numbers: dtype {array.dtype}", field=name)
    return array


def _integers(name: str, value: Any, keep: tuple[type[Any], ...]) -> Array:
    array = _array(name, value)
    if array.dtype.type in keep:
        return array
    if array.size and array.dtype.kind not in "iu":
        raise InvalidDatum(f"dtype {array.dtype}, expected integers", field=name)
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise InvalidDatum(f"{array.max()} does not fit into int64", field=name)
    return array.astype(np.int64)


def _floats(name: str, value: Any) -> Array:
    array = _array(name, value)
    if array.dtype == np.float32:
        return array
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    if array.dtype.kind == "f" and not np.array_equal(np.isfinite(array), np.isfinite(narrow)):
        raise InvalidDatum("a value is too large for float32", field=name)
    return narrow

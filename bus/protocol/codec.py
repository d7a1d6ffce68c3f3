"""One frame for trees that hold arrays: a msgpack skeleton, then the arrays' raw bytes.

Frame, little-endian, every part aligned to 16 bytes from the start of the frame:

    bytes 0..3   magic b"TSF1" (the last byte is the frame's version)
    bytes 4..7   uint32, length of the skeleton
    bytes 8..    the skeleton; then, each after zero padding to 16, the arrays in the order they stand in the skeleton

The skeleton is plain msgpack with string keys. An array stands in it as extension type 1 whose payload is one byte
dtype code, one byte number of dimensions, and one uint64 for each dimension. Codes: 1 float32, 2 float64, 3 int32,
4 int64, 5 uint8, 6 bool (one byte, 0 or 1), 7 uint16 (the bits of bfloat16). Nothing else is carried; never pickle.

Invariants: every size is checked against the buffer before anything of that size is made; a decoded array is a
read-only view of the buffer, not a copy; what `encode` accepts, `decode` returns equal.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import msgpack
import numpy as np

from tinsmith.bus.protocol.errors import InvalidInput, ProtocolError

Tree: TypeAlias = "bool | int | float | str | bytes | Sequence[Tree] | Mapping[str, Tree] | np.ndarray[Any, Any] | None"
"""What a frame can hold; sequences are lists and mappings are dicts, nothing else."""
Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

MAGIC = b"TSF1"
ALIGN = 16
ARRAY_EXT = 1
MAX_DIMS = 8
MAX_DEPTH = 64
_CODES: dict[str, int] = {"float32": 1, "float64": 2, "int32": 3, "int64": 4, "uint8": 5, "bool": 6, "uint16": 7}
_DTYPES: dict[int, np.dtype[Any]] = {code: np.dtype(name).newbyteorder("<") for name, code in _CODES.items()}


def encode(tree: Tree) -> bytes:
    """The frame of a tree.

    Raises InvalidInput for what a frame can't hold: tuples, other dtypes, keys that are not strings, integers beyond
    64 bits, nesting deeper than 64.
    """
    arrays: list[Array] = []
    try:
        skeleton = msgpack.packb(_skeleton(tree, arrays, 0), use_bin_type=True)
    except (OverflowError, UnicodeEncodeError) as error:
        raise InvalidInput(f"a value can't be encoded: {error}", remedy="Keep integers within 64 bits.") from None
    parts: list[Any] = [MAGIC, struct.pack("<I", len(skeleton)), skeleton]
    at = 8 + len(skeleton)
    for array in arrays:
        padding = -at % ALIGN
        parts += [bytes(padding), array.data if array.size else b""]
        at += padding + array.nbytes
    return b"".join(parts)


def decode(buffer: bytes | bytearray | memoryview | Array) -> Any:
    """The tree of a frame; arrays are read-only views of `buffer`, which must not change while they live.

    Raises ProtocolError for anything that is not exactly one valid frame.
    """
    view = _bytes_view(buffer)
    if len(view) < 8 or view[:4] != MAGIC:
        raise ProtocolError("not a tinsmith frame", remedy="Encode the body with tinsmith.bus.protocol.codec.encode.")
    (length,) = struct.unpack_from("<I", view, 4)
    if 8 + length > len(view):
        raise ProtocolError(f"the frame's skeleton has {length} bytes, {len(view) - 8} are there")
    cursor = _Cursor(view, 8 + length)
    try:
        tree = msgpack.unpackb(
            view[8 : 8 + length],
            raw=False,
            strict_map_key=True,
            ext_hook=cursor.array,
            object_pairs_hook=_mapping,
        )
    except ProtocolError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"the frame's skeleton is not valid msgpack: {error}") from None
    if cursor.at != len(view):
        raise ProtocolError(f"the frame has {len(view) - cursor.at} bytes after its last array")
    return tree


def pack_ragged(arrays: Sequence[Array | None]) -> dict[str, Any]:
    """Arrays [n_i] or [n_i, K_i] of one dtype, one per datum (None: absent), as one column.

    Returns {"values": [sum of n_i * max(K_i, 1)], "rows": int64 [datums] with -1 for absent, "cols": int64 [datums]
    with 0 for one dimension, or None when all have one}. Raises InvalidInput that names the datum.
    """
    present = [(at, array) for at, array in enumerate(arrays) if array is not None]
    for at, array in present:
        if array.ndim not in (1, 2):
            raise InvalidInput(f"an array of {array.ndim} dimensions; 1 or 2 can be packed", datum=at)
        if array.dtype != present[0][1].dtype:
            raise InvalidInput(f"dtype {array.dtype}, but an earlier datum has {present[0][1].dtype}", datum=at)
        if array.ndim == 2 and array.shape[1] == 0:
            raise InvalidInput("an array with zero columns", datum=at)
    rows = np.array([-1 if array is None else len(array) for array in arrays], np.int64)
    cols = np.array([0 if array is None or array.ndim == 1 else array.shape[1] for array in arrays], np.int64)
    values = np.concatenate([array.reshape(-1) for _, array in present]) if present else None
    return {"values": values, "rows": rows, "cols": cols if cols.any() else None}


def unpack_ragged(column: Any) -> list[Array | None]:
    """The arrays that `pack_ragged` was given, as views. Raises ProtocolError when the parts don't fit together."""
    try:
        values, rows, cols = column["values"], column["rows"], column["cols"]
    except (TypeError, KeyError):
        raise ProtocolError("a ragged column needs values, rows and cols") from None
    cols = np.zeros_like(rows) if cols is None and isinstance(rows, np.ndarray) else cols
    for name, part in (("rows", rows), ("cols", cols)):
        if not isinstance(part, np.ndarray) or part.dtype != np.int64 or part.ndim != 1:
            raise ProtocolError(f"a ragged column's {name} must be int64 [datums]", field=name)
    if len(rows) != len(cols) or (len(rows) and (rows.min() < -1 or cols.min() < 0)):
        raise ProtocolError("a ragged column's rows and cols don't fit together", field="rows")
    sizes = [max(n, 0) * max(k, 1) for n, k in zip(rows.tolist(), cols.tolist(), strict=True)]
    if values is None and all(n < 0 for n in rows.tolist()):
        return [None] * len(rows)
    if not isinstance(values, np.ndarray) or values.ndim != 1 or sum(sizes) != len(values):
        raise ProtocolError(f"a ragged column's values must be one array of {sum(sizes)} elements", field="values")
    out: list[Array | None] = []
    at = 0
    for n, k, size in zip(rows.tolist(), cols.tolist(), sizes, strict=True):
        piece = values[at : at + size]
        out.append(None if n < 0 else piece if k == 0 else piece.reshape(n, k))
        at += size
    return out


class _Cursor:
    """Walks over the arrays of a frame in the order in which the skeleton names them."""

    def __init__(self, view: memoryview, at: int) -> None:
        self.view = view
        self.at = at

    def array(self, code: int, payload: bytes) -> Array:
        """The array that an extension of the skeleton stands for."""
        if code != ARRAY_EXT or len(payload) < 2 or len(payload) != 2 + 8 * payload[1] or payload[1] > MAX_DIMS:
            raise ProtocolError(f"the frame holds an unknown extension (type {code}, {len(payload)} bytes)")
        dtype = _DTYPES.get(payload[0])
        if dtype is None:
            raise ProtocolError(f"the frame holds an array of unknown dtype code {payload[0]}")
        shape = struct.unpack(f"<{payload[1]}Q", payload[2:])
        count = math.prod(shape)
        start = self.at + (-self.at % ALIGN)
        end = start + count * dtype.itemsize
        if end > len(self.view) or any(dim > 2**62 for dim in shape):
            raise ProtocolError(f"the frame names an array of shape {list(shape)} that its bytes don't hold")
        if any(self.view[self.at : start]):
            raise ProtocolError("the frame's padding is not zero")
        self.at = end
        flat: Array = np.frombuffer(self.view[start:end], np.uint8 if dtype == np.bool_ else dtype)
        if dtype == np.bool_:
            if flat.size and flat.max() > 1:
                raise ProtocolError("the frame holds a bool that is neither 0 nor 1")
            flat = flat.view(np.bool_)
        shaped = flat.reshape(shape)
        shaped.flags.writeable = False
        return shaped


def _bytes_view(buffer: bytes | bytearray | memoryview | Array) -> memoryview:
    if isinstance(buffer, np.ndarray) and (buffer.dtype != np.uint8 or buffer.ndim != 1):
        raise ProtocolError(f"a frame must be bytes or uint8 [n], not {buffer.dtype} {list(buffer.shape)}")
    try:
        view = memoryview(cast(Any, buffer))
        return view.cast("B") if view.nbytes else memoryview(b"")
    except TypeError:
        raise ProtocolError("a frame must be one contiguous run of bytes") from None


def _mapping(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs) or not all(isinstance(key, str) for key in mapping):
        raise ProtocolError("the frame holds a map with a repeated key or one that is not a string")
    return mapping


def _skeleton(tree: Any, arrays: list[Array], depth: int) -> Any:
    # Exact types: a subclass (an enum, a numpy scalar) would come back as something else.
    if tree is None or type(tree) in (bool, int, float, str, bytes):
        return tree
    if depth >= MAX_DEPTH:
        raise InvalidInput(f"the tree is nested deeper than {MAX_DEPTH}")
    if type(tree) is list:
        return [_skeleton(item, arrays, depth + 1) for item in tree]
    if type(tree) is dict:
        if not all(type(key) is str for key in tree):
            raise InvalidInput("a map key is not a string", remedy="Use string keys.")
        return {key: _skeleton(item, arrays, depth + 1) for key, item in tree.items()}
    if isinstance(tree, np.ndarray):
        code = _CODES.get(tree.dtype.name)
        if code is None or tree.ndim > MAX_DIMS:
            raise InvalidInput(
                f"an array of dtype {tree.dtype} with {tree.ndim} dimensions can't be encoded",
                remedy=f"Use one of {', '.join(_CODES)} (bfloat16: its bits as uint16).",
            )
        arrays.append(np.ascontiguousarray(tree, _DTYPES[code]))
        payload = struct.pack(f"<BB{tree.ndim}Q", code, tree.ndim, *tree.shape)
        return msgpack.ExtType(ARRAY_EXT, payload)
    raise InvalidInput(f"a {type(tree).__name__} can't be encoded", remedy="Use lists, maps, numbers, bytes, arrays.")

"""Tensors of the Tinker API, dense or CSR, protobuf or JSON, as numpy arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tinsmith.api.http.tinker.encoding import tinsmith_pb2 as pb
from tinsmith.bus.protocol.errors import InvalidDatum

Array = npt.NDArray[Any]

MAX_DENSE_BYTES = 1 << 28
"""A CSR tensor that would be larger than this when written out is refused."""

_NUMPY: dict[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_BFLOAT16: np.dtype("<u2"),
}


def from_proto(tensor: pb.Tensor) -> Array:
    """Its values: float32 or int64 or int32, in its shape. Raises InvalidDatum (without place) for what is not one."""
    dtype = _NUMPY.get(tensor.dtype)
    if dtype is None:
        raise InvalidDatum(f"unknown dtype {tensor.dtype}", remedy="Use float32 or int64.")
    kind = tensor.WhichOneof("encoding")
    if kind == "sparse_csr":
        parts = tensor.sparse_csr
        return _dense(
            _numbers(parts.values, dtype),
            _numbers(parts.crow_indices, np.dtype("<i8")),
            _numbers(parts.col_indices, np.dtype("<i8")),
            list(tensor.shape),
        )
    return _shaped(_numbers(tensor.dense, dtype), list(tensor.shape))


def from_json(tensor: Any, blank: int = 0) -> Array:
    """As from_proto, of {data, dtype, shape?, sparse_crow_indices?, sparse_col_indices?}; cells that a sparse one does
    not list are `blank`."""
    if not isinstance(tensor, Mapping) or not isinstance(tensor.get("data"), list):
        raise InvalidDatum("not a tensor", remedy="Send {data, dtype, shape}.")
    known: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "int64": np.dtype("<i8")}
    dtype = known.get(str(tensor.get("dtype")))
    if dtype is None:
        raise InvalidDatum(f"unknown dtype {tensor.get('dtype')!r}", remedy="Use float32 or int64.")
    try:
        data = np.asarray(tensor["data"], dtype)
        shape = [int(size) for size in tensor.get("shape") or []]
        if tensor.get("sparse_crow_indices") is not None:
            crow = np.asarray(tensor["sparse_crow_indices"], np.int64)
            return _dense(data, crow, np.asarray(tensor.get("sparse_col_indices") or [], np.int64), shape, blank)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidDatum(f"not an array of numbers: {error}") from None
    return _shaped(data, shape)


def _numbers(data: bytes, dtype: np.dtype[Any]) -> Array:
    if len(data) % dtype.itemsize:
        raise InvalidDatum(f"{len(data)} bytes are not a whole number of {dtype.itemsize}-byte elements")
    numbers = np.frombuffer(data, dtype)
    if dtype == np.dtype("<u2"):
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers


def _shaped(values: Array, shape: Sequence[int]) -> Array:
    if not shape:
        return values
    if min(shape) < 0 or math.prod(shape) != values.size:
        raise InvalidDatum(f"{values.size} elements don't have the shape {list(shape)}")
    return values.reshape(shape)


def _dense(values: Array, crow: Array, col: Array, shape: Sequence[int], blank: int = 0) -> Array:
    """A CSR matrix written out; cells that are not listed are `blank`."""
    if len(shape) != 2 or min(shape) < 0 or math.prod(shape) * values.dtype.itemsize > MAX_DENSE_BYTES:
        raise InvalidDatum(f"a sparse tensor can't have the shape {list(shape)}")
    rows, cols = shape
    fits = len(crow) == rows + 1 and len(col) == len(values) and int(crow[0]) == 0 and int(crow[-1]) == len(col)
    counts = np.diff(crow)
    if not fits or (counts < 0).any() or (len(col) and (col.min() < 0 or col.max() >= cols)):
        raise InvalidDatum("a sparse tensor's indices don't fit its shape")
    dense = np.full((rows, cols), blank, values.dtype)
    dense[np.repeat(np.arange(rows), counts), col] = values
    return dense

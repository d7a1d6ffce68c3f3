"""Frames: what goes in comes out equal, and garbage is refused before anything is made of it."""

from __future__ import annotations

import struct

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tinsmith.bus.protocol.codec import ARRAY_EXT, MAGIC, decode, encode, pack_ragged, unpack_ragged
from tinsmith.bus.protocol.errors import InvalidInput, ProtocolError

DTYPES = ["float32", "float64", "int32", "int64", "uint8", "bool", "uint16"]
ARRAYS = st.sampled_from(DTYPES).flatmap(lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0)))
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.binary(max_size=8)
    | ARRAYS
)
TREES = st.recursive(
    LEAVES, lambda t: st.lists(t, max_size=4) | st.dictionaries(st.text("ab", max_size=3), t), max_leaves=12
)


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


@settings(max_examples=150, deadline=None)
@given(TREES)
def test_what_is_encoded_decodes_equal(tree: object) -> None:
    frame = encode(tree)  # type: ignore[arg-type]
    assert same(tree, decode(frame))
    assert same(tree, decode(np.frombuffer(frame, np.uint8)))
    assert same(tree, decode(memoryview(bytearray(frame))))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64), st.booleans())
def test_garbage_is_a_protocol_error(junk: bytes, magic: bool) -> None:
    with pytest.raises(ProtocolError):
        decode((MAGIC if magic else b"") + junk + b"\xc1")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_frame_is_refused_or_read_but_never_crashes(data: st.DataObject) -> None:
    frame = bytearray(encode({"a": np.arange(5, dtype=np.int64), "b": [1, "x", np.ones(3, bool)]}))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(frame))
    except ProtocolError:
        return


@pytest.mark.parametrize("cut", [1, 4, 8, 20])
def test_a_short_or_long_frame_is_refused(cut: int) -> None:
    frame = encode({"a": np.arange(9, dtype=np.float32)})
    with pytest.raises(ProtocolError):
        decode(frame[:-cut])
    with pytest.raises(ProtocolError):
        decode(frame + bytes(cut))


def test_a_huge_shape_is_refused_before_anything_is_allocated() -> None:
    for dims in ([2**62], [2**40, 2**40], [2**63, 0], [0, 2**64 - 1]):
        array = msgpack.ExtType(ARRAY_EXT, struct.pack(f"<BB{len(dims)}Q", 1, len(dims), *dims))
        skeleton = msgpack.packb({"a": array})
        with pytest.raises(ProtocolError):
            decode(MAGIC + struct.pack("<I", len(skeleton)) + skeleton)


def test_decoded_arrays_are_read_only_views() -> None:
    frame = bytearray(encode({"a": np.arange(1000, dtype=np.int32)}))
    array = decode(frame)["a"]
    assert np.shares_memory(array, np.frombuffer(frame, np.uint8))
    assert not array.flags.writeable


@pytest.mark.parametrize(
    "tree",
    [(1, 2), {1: 2}, 2**64, object(), np.float32(1), np.ones(2, np.float16), np.array(["a"]), {"a": {3}}, [1j]],
    ids=str,
)
def test_what_a_frame_cannot_hold_is_refused(tree: object) -> None:
    with pytest.raises(InvalidInput):
        encode(tree)  # type: ignore[arg-type]


def test_too_deep_a_tree_is_refused_on_both_sides() -> None:
    tree: object = 1
    for _ in range(100):
        tree = [tree]
    with pytest.raises(InvalidInput):
        encode(tree)  # type: ignore[arg-type]
    skeleton = b"\x91" * 5000 + b"\x01"
    with pytest.raises(ProtocolError):
        decode(MAGIC + struct.pack("<I", len(skeleton)) + skeleton)


def test_big_endian_and_strided_arrays_arrive_equal() -> None:
    array = np.arange(24, dtype=">f8").reshape(4, 6)[::2, 1::2]
    assert np.array_equal(decode(encode({"a": array}))["a"], array)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.none() | st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=8))
def test_ragged_columns_come_back(shapes: list[tuple[int, int] | None]) -> None:
    rng = np.random.default_rng(0)
    arrays = [None if s is None else rng.random(s if s[1] else s[:1]).astype(np.float32) for s in shapes]
    back = unpack_ragged(decode(encode(pack_ragged(arrays))))
    assert len(back) == len(arrays)
    assert all((a is None and b is None) or same(a, b) for a, b in zip(arrays, back, strict=True))


def test_ragged_columns_refuse_mixed_dtypes_and_bad_parts() -> None:
    with pytest.raises(InvalidInput, match="datum 1"):
        pack_ragged([np.ones(2, np.float32), np.ones(2, np.int64)])
    good = pack_ragged([np.ones(2, np.float32), None])
    bad = [
        {**good, "rows": np.array([3, -1])},
        {**good, "rows": np.array([2, -2])},
        {**good, "values": None},
        {**good, "cols": np.array([1])},
        {"values": 1},
        None,
    ]
    for column in bad:
        with pytest.raises(ProtocolError):
            unpack_ragged(column)

"""Datums: lists or arrays in, the same columns out; what can't be represented is named."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.bus.protocol.codec import encode
from tinsmith.bus.protocol.datum import Datum, pack_datums, unpack_datums
from tinsmith.bus.protocol.errors import InvalidDatum, ProtocolError

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=6)
FLOATS = st.lists(st.floats(width=32), max_size=6)
WIDE = st.lists(st.lists(st.floats(width=32), min_size=2, max_size=2), min_size=1, max_size=4)
DATUMS = st.builds(
    Datum,
    TOKENS,
    st.fixed_dictionaries({}, optional={"target_tokens": TOKENS, "weights": FLOATS, "logprobs": FLOATS | WIDE}),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(DATUMS, max_size=5))
def test_datums_come_back_equal(data: list[Datum]) -> None:
    body, lengths = pack_datums(data)
    back = unpack_datums(body)
    assert lengths == tuple(len(d) for d in data) == tuple(len(d) for d in back)
    for one, other in zip(data, back, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        assert one.inputs.keys() == other.inputs.keys()
        for name, array in one.inputs.items():
            assert array.dtype == other.inputs[name].dtype == (np.int64 if name == "target_tokens" else np.float32)
            assert np.array_equal(array, other.inputs[name], equal_nan=True)


def test_lists_and_other_dtypes_are_converted() -> None:
    made = Datum([1, 2], {"target_tokens": np.array([[1], [2]], np.uint8), "weights": [0, 1], "mask": [True, False]})
    assert made.tokens.dtype == np.int64
    assert Datum(np.ones(2, np.int32)).tokens.dtype == np.int32
    assert made.inputs["target_tokens"].dtype == np.int64
    assert made.inputs["target_tokens"].shape == (2, 1)
    assert made.inputs["weights"].dtype == made.inputs["mask"].dtype == np.float32


@pytest.mark.parametrize(
    ("tokens", "inputs", "field"),
    [
        ([1.5], {}, "tokens"),
        ([[1]], {}, "tokens"),
        (["a"], {}, "tokens"),
        (np.array([2**63], np.uint64), {}, "tokens"),
        ([1], {"target_tokens": [0.5]}, "target_tokens"),
        ([1], {"weights": [[1], [2, 3]]}, "weights"),
        ([1], {"weights": 1.0}, "weights"),
        ([1], {"weights": [1e300]}, "weights"),
        ([1], {"weights": [None]}, "weights"),
    ],
)
def test_what_is_no_datum_names_the_field(tokens: object, inputs: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidDatum) as caught:
        Datum(tokens, inputs)
    assert caught.value.field == field


def test_other_bodies_are_refused() -> None:
    body, _ = pack_datums([Datum([1, 2], {"weights": [1, 1]})])
    for other in (
        b"",
        body[:-1],
        encode({"tokens": None, "inputs": {}}),
        encode([1]),
        encode({"tokens": {}, "inputs": 1}),
    ):
        with pytest.raises(ProtocolError):
            unpack_datums(other)

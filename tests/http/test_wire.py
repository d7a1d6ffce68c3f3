"""The wire: what clients may send, byte by byte, and what they read of the results."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from tinker.proto import response_conv

from tinsmith.api.http.tenancy.names import given_name, parse_path
from tinsmith.api.http.tinker.encoding import tensors
from tinsmith.api.http.tinker.encoding import tinsmith_pb2 as pb
from tinsmith.api.http.tinker.encoding.batches import decompress, read_json, read_proto
from tinsmith.api.http.tinker.encoding.results import as_proto
from tinsmith.bus.protocol.codec import encode, pack_ragged
from tinsmith.bus.protocol.datum import unpack_datums
from tinsmith.bus.protocol.envelope import Event, Kind
from tinsmith.bus.protocol.errors import InvalidDatum, InvalidInput


def _csr(values: list[float], crow: list[int], col: list[int], shape: list[int]) -> pb.Tensor:
    sparse = pb.SparseCsr(
        values=np.asarray(values, "<f4").tobytes(),
        crow_indices=np.asarray(crow, "<i8").tobytes(),
        col_indices=np.asarray(col, "<i8").tobytes(),
    )
    return pb.Tensor(sparse_csr=sparse, dtype=pb.DTYPE_FLOAT32, shape=shape)


def test_a_sparse_tensor_is_the_dense_one_with_zeros() -> None:
    dense = tensors.from_proto(_csr([1.0, 2.0, 3.0], [0, 2, 2, 3], [0, 2, 1], [3, 3]))
    assert dense.tolist() == [[1, 0, 2], [0, 0, 0], [0, 3, 0]]


@pytest.mark.parametrize(
    ("crow", "col", "shape"),
    [([0, 2, 1, 3], [0, 1, 2], [3, 3]), ([0, 1, 2, 3], [0, 1, 3], [3, 3]), ([0, 1, 3], [0, 1, 2], [3, 3])],
)
def test_indices_that_do_not_fit_are_refused(crow: list[int], col: list[int], shape: list[int]) -> None:
    with pytest.raises(InvalidDatum):
        tensors.from_proto(_csr([1.0, 2.0, 3.0], crow, col, shape))


def test_a_sparse_tensor_too_large_to_write_out_is_refused() -> None:
    with pytest.raises(InvalidDatum):
        tensors.from_proto(_csr([], [0], [], [1 << 20, 1 << 20]))


def test_bfloat16_keeps_its_values() -> None:
    bits = (np.asarray([1.5, -2.0, 0.0], np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    assert tensors.from_proto(pb.Tensor(dense=bits, dtype=pb.DTYPE_BFLOAT16, shape=[3])).tolist() == [1.5, -2.0, 0.0]


def test_a_bad_datum_is_named_and_its_turn_is_still_known() -> None:
    request = pb.ForwardBackwardRequest(model_id="m", seq_id=7, loss_fn="cross_entropy")
    good = request.data.add()
    good.model_input.add().encoded_text.tokens = np.asarray([1, 2], "<i4").tobytes()
    request.data.add().model_input.add().image.data = b"png"
    batch = read_proto(request.SerializeToString())
    assert (batch.model, batch.seq) == ("m", 7)
    assert isinstance(batch.error, InvalidDatum)
    assert (batch.error.datum, batch.error.field) == (1, "model_input")


def test_the_newer_loss_config_wins_over_its_mirror() -> None:
    request = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo", loss_fn_config={"clip": 1.0})
    request.loss_fn_config_v2["clip"].number = 2.0
    request.loss_fn_config_v2["mode"].text = "x"
    assert read_proto(request.SerializeToString()).args["config"] == {"clip": 2.0, "mode": "x"}


def test_json_of_older_clients_gives_the_same_batch() -> None:
    tensor = {"data": [2, 3], "dtype": "int64", "shape": [2]}
    datum = {"model_input": {"chunks": [{"tokens": [1, 2]}]}, "loss_fn_inputs": {"target_tokens": tensor}}
    content = {"data": [datum], "loss_fn": "cross_entropy"}
    batch = read_json({"forward_backward_input": content, "model_id": "m", "seq_id": 1}, Kind.FORWARD_BACKWARD)
    (read,) = unpack_datums(batch.body)
    assert read.tokens.tolist() == [1, 2]
    assert read.inputs["target_tokens"].tolist() == [2, 3]


def test_compressed_bodies_are_read_and_broken_ones_refused() -> None:
    assert decompress(zstandard.compress(b"hello"), "zstd") == b"hello"
    with pytest.raises(InvalidInput):
        decompress(b"hello", "zstd")
    with pytest.raises(InvalidInput):
        decompress(b"hello", "br")


def test_the_sdk_reads_log_probs_of_any_shape_and_nan_stays_nan() -> None:
    arrays = [
        np.asarray([-1.0, np.nan], np.float32),
        np.asarray([[-1.0, -2.0], [-3.0, -4.0]], np.float32),
        np.asarray([-5.0], np.float32),
    ]
    body = encode({"logprobs": pack_ragged(arrays)})
    event = Event(id="r", model="m", kind=Kind.FORWARD, seq=1, ok=True, metrics={"loss:sum": float("nan")})
    output = response_conv.deserialize_forward_backward_output(as_proto(event, body))
    assert np.isnan(output.metrics["loss:sum"])
    read = [row["logprobs"].to_numpy() for row in output.loss_fn_outputs]
    for one, other in zip(read, arrays, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "path", ["tinker://m/weights", "tinker://m/other/x", "m/weights/x", "tinker://m/weights/a/b", 3]
)
def test_what_is_no_path_is_refused(path: object) -> None:
    with pytest.raises(InvalidInput):
        parse_path(path)


@pytest.mark.parametrize("name", ["a b", "", "@7", "a/b", "x" * 129, 7])
def test_what_can_not_name_a_checkpoint_is_refused(name: object) -> None:
    with pytest.raises(InvalidInput):
        given_name(name, 1)


def test_a_truncated_compressed_body_is_refused() -> None:
    whole = zstandard.compress(bytes(1_000_000))
    with pytest.raises(InvalidInput):
        decompress(whole[:-8], "zstd")

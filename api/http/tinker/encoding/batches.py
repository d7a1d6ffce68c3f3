"""A forward or forward_backward request, protobuf or JSON, as the arguments and the body of a command."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from google.protobuf.message import DecodeError

from tinsmith.api.http.tinker.encoding import tensors
from tinsmith.api.http.tinker.encoding import tinsmith_pb2 as pb
from tinsmith.bus.protocol.datum import Datum, pack_datums
from tinsmith.bus.protocol.envelope import Kind
from tinsmith.bus.protocol.errors import InvalidDatum, InvalidInput

MAX_BODY_BYTES = 1 << 30
"""A compressed request that would be larger than this is refused."""


@dataclass(frozen=True)
class Batch:
    """Which model and turn a request is for, and what it asks or why it can't be carried out."""

    model: str
    seq: int
    kind: Kind
    args: dict[str, Any]
    body: bytes = b""
    lengths: tuple[int, ...] = ()
    error: InvalidInput | None = None


def decompress(body: bytes, encoding: str) -> bytes:
    """The body as it was before a Content-Encoding. Raises InvalidInput."""
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise InvalidInput(f"the content encoding {encoding!r} is not known", remedy="Use zstd.")
    parts, size = [], 0
    try:
        for part in zstandard.ZstdDecompressor().read_to_iter(body):
            parts.append(part)
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise InvalidInput(f"the body has more than {MAX_BODY_BYTES} bytes")
        declared = zstandard.get_frame_parameters(body).content_size
    except zstandard.ZstdError as error:
        raise InvalidInput(f"the body is not zstd: {error}") from None
    if declared not in (size, zstandard.CONTENTSIZE_UNKNOWN):
        raise InvalidInput(f"the body has {size} bytes of {declared}")
    return b"".join(parts)


def read_proto(body: bytes) -> Batch:
    """The batch of a ForwardBackwardRequest.

    Raises InvalidInput only when not even the model and its turn can be read; anything else is told by `error`.
    """
    request = pb.ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        raise InvalidInput(f"the body is not a ForwardBackwardRequest: {error}") from None
    config: dict[str, Any] = dict(request.loss_fn_config)
    if request.loss_fn_config_v2:
        config = {
            key: value.text if value.WhichOneof("value") == "text" else value.number
            for key, value in request.loss_fn_config_v2.items()
        }
    kind = Kind.FORWARD if request.forward_only else Kind.FORWARD_BACKWARD
    data = ((_proto_tokens(datum), _proto_inputs(datum)) for datum in request.data)
    return _batch(request.model_id, request.seq_id, kind, request.loss_fn, config, data)


def read_json(request: Mapping[str, Any], kind: Kind) -> Batch:
    """The batch of a JSON request, as clients before 0.25 send it. Raises as read_proto."""
    model, seq = request.get("model_id"), request.get("seq_id")
    if not isinstance(model, str) or not isinstance(seq, int):
        raise InvalidInput("model_id and seq_id are needed", field="seq_id")
    given = request.get("forward_input" if kind is Kind.FORWARD else "forward_backward_input")
    content: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    listed = content.get("data")
    data = ((_json_tokens(datum), _json_inputs(datum)) for datum in (listed if isinstance(listed, list) else []))
    config = content.get("loss_fn_config") or {}
    return _batch(model, seq, kind, str(content.get("loss_fn", "")), dict(config), data)


def _batch(
    model: str,
    seq: int,
    kind: Kind,
    loss: str,
    config: dict[str, Any],
    data: Iterable[tuple[Any, Mapping[str, Any]]],
) -> Batch:
    args = {"loss": loss, "config": config}
    datums: list[Datum] = []
    try:
        for tokens, inputs in data:
            datums.append(Datum(tokens, inputs))
        body, lengths = pack_datums(datums)
    except InvalidInput as error:
        if error.datum is None:
            error.datum = len(datums)
        return Batch(model, seq, kind, args, error=error)
    return Batch(model, seq, kind, args, body, lengths)


def _proto_tokens(datum: pb.Datum) -> Any:
    parts = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise _not_text(kind)
        data = chunk.encoded_text.tokens
        if len(data) % 4:
            raise InvalidDatum(f"{len(data)} bytes are not a whole number of int32 tokens", field="model_input")
        parts.append(np.frombuffer(data, "<i4"))
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _proto_inputs(datum: pb.Datum) -> dict[str, Any]:
    return _inputs(datum.loss_fn_inputs, tensors.from_proto)


def _inputs(encoded: Mapping[str, Any], read: Callable[[Any], Any]) -> dict[str, Any]:
    """Each loss input as `read` decodes it; an InvalidDatum names the input."""
    inputs = {}
    for name, tensor in encoded.items():
        try:
            inputs[name] = read(tensor)
        except InvalidDatum as error:
            error.field = name
            raise
    return inputs


def tokens_of(prompt: Any) -> Any:
    """The tokens of a JSON ModelInput {chunks}. Raises InvalidDatum for anything but text."""
    chunks = prompt.get("chunks") if isinstance(prompt, Mapping) else None
    if not isinstance(chunks, list):
        raise InvalidDatum("not a list of chunks", field="chunks")
    tokens: list[Any] = []
    for chunk in chunks:
        if not isinstance(chunk, Mapping) or chunk.get("type", "encoded_text") != "encoded_text":
            raise _not_text(chunk.get("type") if isinstance(chunk, Mapping) else chunk)
        part = chunk.get("tokens")
        if not isinstance(part, list) or not all(type(token) is int and -(2**31) <= token < 2**31 for token in part):
            raise InvalidDatum("a chunk's tokens are not a list of int32", field="chunks")
        tokens.extend(part)
    return np.asarray(tokens, np.int32)


def _json_tokens(datum: Any) -> Any:
    return tokens_of(datum.get("model_input") if isinstance(datum, Mapping) else None)


def _json_inputs(datum: Any) -> dict[str, Any]:
    return _inputs(datum.get("loss_fn_inputs") or {}, tensors.from_json)


def _not_text(kind: Any) -> InvalidDatum:
    return InvalidDatum(
        f"a chunk of kind {kind!r} can't be read by this model", remedy="Send encoded_text.", field="model_input"
    )

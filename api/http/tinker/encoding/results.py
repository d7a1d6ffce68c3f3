"""What a command led to, as the client expects it: protobuf for forward, forward_backward and sample, else JSON."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from tinsmith.api.http.errors import failed_future
from tinsmith.api.http.tenancy.names import UNNAMED_PREFIX, TinkerPath, unnamed_sampler_id
from tinsmith.api.http.tinker.encoding import tinsmith_pb2 as pb
from tinsmith.bus.protocol.codec import decode, unpack_ragged
from tinsmith.bus.protocol.envelope import Event, Kind
from tinsmith.bus.protocol.errors import TinsmithError, UnknownCommand

Array = npt.NDArray[Any]

PROTO_KINDS = frozenset({Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.SAMPLE})


def as_proto(event: Event, body: bytes) -> bytes:
    """The message of a successful forward, forward_backward or sample."""
    message = _sample(event, _tree(event, body)) if event.kind is Kind.SAMPLE else _forward(event, _tree(event, body))
    return bytes(message.SerializeToString())


def as_json(event: Event, body: bytes) -> dict[str, Any]:
    """The result, or the failure, of any command."""
    if event.error is not None:
        return failed_future(TinsmithError.from_wire(event.error))
    model, result = event.model, event.result
    match event.kind:
        case Kind.CREATE_MODEL if "checkpoint" in result:
            return {"path": str(_path("weights", result["checkpoint"])), "model_id": model, "type": "load_weights"}
        case Kind.CREATE_MODEL:
            return {"model_id": model, "type": "create_model"}
        case Kind.OPTIM_STEP:
            return {"metrics": event.metrics, "type": "optim_step"}
        case Kind.SAVE:
            return {"path": str(_path("weights", result["checkpoint"])), "type": "save_weights"}
        case Kind.LOAD:
            return {"path": str(_path("weights", result["checkpoint"])), "model_id": model, "type": "load_weights"}
        case Kind.PUBLISH:
            path = _path("sampler_weights", result["version"]).shown
            if path.kind == "external_weights":
                return {"path": str(path), "type": "save_weights_external"}
            if not path.name.startswith(UNNAMED_PREFIX):
                return {"path": str(path), "type": "save_weights_for_sampler"}
            sampler = unnamed_sampler_id(model, int(path.name.removeprefix(UNNAMED_PREFIX)))
            return {"sampling_session_id": sampler, "type": "save_weights_for_sampler"}
        case Kind.FORWARD | Kind.FORWARD_BACKWARD:
            return _forward_json(event, _tree(event, body))
        case Kind.SAMPLE:
            return _sample_json(event, _tree(event, body))
    return dict(result)


def _path(kind: Any, place: str) -> TinkerPath:
    model, _, name = place.partition("/")
    return TinkerPath(model, kind, name)


def _tree(event: Event, body: bytes) -> dict[str, Any]:
    if not body and event.body_bytes:
        raise UnknownCommand("the result was fetched and is no longer kept", command=event.id)
    return dict(decode(body)) if body else {}


def _forward(event: Event, tree: dict[str, Any]) -> pb.ForwardBackwardOutput:
    arrays = [array for array in unpack_ragged(tree["logprobs"]) if array is not None]
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=event.metrics)
    # One record for each run of datums with the same trailing shape.
    for trailing, run in groupby(arrays, key=lambda array: array.shape[1:]):
        rows = list(run)
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(rows))
        column = record.fields["logprobs"]
        column.data = np.concatenate([row.reshape(-1) for row in rows]).astype("<f4", copy=False).tobytes()
        column.offsets = np.cumsum([0, *(4 * row.size for row in rows)], dtype="<i8").tobytes()
        column.dtype = pb.DTYPE_FLOAT32
        column.trailing_shape.extend(trailing)
    return output


def _forward_json(event: Event, tree: dict[str, Any]) -> dict[str, Any]:
    outputs = [
        {"logprobs": {"data": array.reshape(-1).tolist(), "dtype": "float32", "shape": list(array.shape)}}
        for array in unpack_ragged(tree["logprobs"])
        if array is not None
    ]
    return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": event.metrics}


def _sample(event: Event, tree: dict[str, Any]) -> pb.SampleResponse:
    response = pb.SampleResponse()
    topk = _columns(tree, "topk_tokens"), _columns(tree, "topk_logprobs")
    for at, (tokens, logprobs, reason) in enumerate(_sequences(event, tree)):
        sequence = response.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if reason == "stop" else pb.STOP_REASON_LENGTH,
            tokens=tokens.astype("<i4", copy=False).tobytes(),
            logprobs=logprobs.astype("<f4", copy=False).tobytes(),
        )
        if topk[0]:
            sequence.topk_sampled_logprobs.CopyFrom(_topk(topk[0][at], topk[1][at]))
    if "prompt_logprobs" in tree:
        response.prompt_logprobs = tree["prompt_logprobs"].astype("<f4", copy=False).tobytes()
    if "prompt_topk_tokens" in tree:
        response.topk_prompt_logprobs.CopyFrom(_topk(tree["prompt_topk_tokens"], tree["prompt_topk_logprobs"]))
    if "target_logprobs" in tree:
        response.target_prompt_logprobs.CopyFrom(_targets(tree["target_logprobs"]))
    if "prompt_draws_tokens" in tree:
        drawn = response.prompt_alt_tokens
        for into, name, kind, dtype in (
            (drawn.tokens, "prompt_draws_tokens", pb.DTYPE_INT32, "<i4"),
            (drawn.logprobs, "prompt_draws_logprobs", pb.DTYPE_FLOAT32, "<f4"),
        ):
            into.dtype, into.dense = kind, tree[name].astype(dtype, copy=False).tobytes()
            into.shape.extend(tree[name].shape)
    return response


def _targets(logprobs: Array) -> pb.Tensor:
    """float32 [positions, K] in the layout of the request: NaN stands where a sparse one listed no cell."""
    tensor = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=logprobs.shape)
    listed = ~np.isnan(logprobs)
    if listed.all():
        tensor.dense = logprobs.astype("<f4", copy=False).tobytes()
        return tensor
    tensor.sparse_csr.values = logprobs[listed].astype("<f4", copy=False).tobytes()
    tensor.sparse_csr.crow_indices = np.cumsum([0, *listed.sum(1)], dtype="<i8").tobytes()
    tensor.sparse_csr.col_indices = np.nonzero(listed)[1].astype("<i8").tobytes()
    return tensor


def _topk(tokens: Array, logprobs: Array) -> pb.TopkLogprobs:
    """tokens int32 [length, k] and logprobs float32 [length, k], best first."""
    return pb.TopkLogprobs(
        token_ids=tokens.astype("<i4", copy=False).tobytes(),
        logprobs=logprobs.astype("<f4", copy=False).tobytes(),
        k=tokens.shape[1],
        length=tokens.shape[0],
    )


def _sample_json(event: Event, tree: dict[str, Any]) -> dict[str, Any]:
    sequences = [
        {"stop_reason": reason, "tokens": tokens.tolist(), "logprobs": logprobs.tolist()}
        for tokens, logprobs, reason in _sequences(event, tree)
    ]
    answer: dict[str, Any] = {"type": "sample", "sequences": sequences}
    if "prompt_logprobs" in tree:
        answer["prompt_logprobs"] = [None if np.isnan(value) else value for value in tree["prompt_logprobs"].tolist()]
    return answer


def _sequences(event: Event, tree: dict[str, Any]) -> list[tuple[Array, Array, str]]:
    columns = zip(_columns(tree, "tokens"), _columns(tree, "logprobs"), event.result["stop_reasons"], strict=True)
    return list(columns)


def _columns(tree: dict[str, Any], name: str) -> list[Array]:
    return [array for array in unpack_ragged(tree[name]) if array is not None] if name in tree else []

"""Tinker API: sampling. A request is answered at once with the id of its future; nothing here has an order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from tinsmith.api.http.fields import field, maybe, optional
from tinsmith.api.http.gateway import Gateway
from tinsmith.api.http.responses import json_response, read_object
from tinsmith.api.http.tenancy.names import request_id
from tinsmith.api.http.tenancy.records import SamplerRecord
from tinsmith.api.http.tinker.encoding import tensors
from tinsmith.api.http.tinker.encoding.batches import tokens_of
from tinsmith.api.http.tinker.startup import gateway_of
from tinsmith.bus.protocol.codec import encode
from tinsmith.bus.protocol.envelope import SAMPLE_LANE, Command, Kind
from tinsmith.bus.protocol.errors import InvalidInput, TinsmithError, UnknownVersion

router = APIRouter(prefix="/api/v1")

_NO_CELL = -(2**62)


@router.post("/asample")
async def asample(request: Request) -> Response:
    """Sample from the version of a sampling session."""
    gateway, body = gateway_of(request), await read_object(request)
    sampler, seq = field(body, "sampling_session_id", str), field(body, "seq_id", int)
    await gateway.check_owner(request, sampler)
    record = await gateway.store.sampler(sampler)
    name = request_id(sampler, seq)
    args: dict[str, Any] = {}
    content = b""
    error: TinsmithError | None = None
    try:
        if record is None:
            raise UnknownVersion(f"there is no sampling session {sampler!r}", remedy="Create it; it may be over.")
        prompt = tokens_of(body.get("prompt"))
        content = encode({"prompt": prompt, **_targets(body.get("target_prompt_logprobs"))})
        args = await _args(gateway, record, body, len(prompt))
    except InvalidInput as wrong:
        error = wrong
    command = Command(id=name, model=SAMPLE_LANE, kind=Kind.SAMPLE, seq=-1, args=args)
    future = await gateway.submit(command, content, error)
    count = body.get("num_samples", 1)
    count = count if isinstance(count, int) and 0 < count <= 1024 else 1
    return json_response({"request_id": future, "sample_sequence_ids": [f"{name}:{i}" for i in range(count)]})


@router.get("/samplers/{sampler}")
async def get_sampler(request: Request, sampler: str) -> Response:
    """Over which base model and weights a sampling session is."""
    gateway = gateway_of(request)
    await gateway.check_owner(request, sampler)
    record = await gateway.store.sampler(sampler)
    if record is None:
        raise UnknownVersion(f"there is no sampling session {sampler!r}", remedy="Create it; it may be over.")
    return json_response({"sampler_id": sampler, "base_model": record.base, "model_path": record.model_path})


async def _args(gateway: Gateway, record: SamplerRecord, body: Mapping[str, Any], prompt_tokens: int) -> dict[str, Any]:
    if body.get("record_stability_info"):
        raise InvalidInput(
            "stable_reinforce is not served, so nothing is recorded for it",
            remedy="Use importance_sampling, ppo, cispo, gspo or dro with the log-probs that came with the samples.",
            field="record_stability_info",
        )
    params = optional(body, "sampling_params", dict[str, Any], {})
    most = maybe(params, "max_tokens", int)
    if most is None:
        # As many as the context has room for.
        most = max(1, await gateway.context() - prompt_tokens)
    return {
        "version": record.version,
        "n": optional(body, "num_samples", int, 1),
        "max_tokens": most,
        "temperature": optional(params, "temperature", float, 1.0),
        "top_k": optional(params, "top_k", int, -1),
        "top_p": optional(params, "top_p", float, 1.0),
        "seed": maybe(params, "seed", int),
        "prompt_logprobs": optional(body, "prompt_logprobs", bool, False),
        "prompt_last_n": maybe(body, "prompt_logprobs_last_n", int),
        "prompt_topk": optional(body, "topk_prompt_logprobs", int, 0),
        "prompt_draws": optional(body, "prompt_alt_tokens_k", int, 0),
        "topk": optional(body, "topk_sample_logprobs", int, 0),
        **stop_args(params.get("stop")),
    }


def _targets(tensor: Any) -> dict[str, Any]:
    """The targets for a command's body: -1 where there is no cell, -2 where a cell asks for nothing."""
    if tensor is None:
        return {}
    try:
        if isinstance(tensor, dict) and tensor.get("dtype") != "int64":
            raise InvalidInput(f"dtype {tensor.get('dtype')!r}, expected int64")
        cells = tensors.from_json(tensor, blank=_NO_CELL)
    except InvalidInput as error:
        error.field = "target_prompt_logprobs"
        raise
    return {"targets": np.where(cells == _NO_CELL, -1, np.where(cells < 0, -2, cells))}


def stop_args(stop: Any) -> dict[str, Any]:
    """Stop rules: absent, the model's own end tokens; strings, those too; token ids, those alone; [], none at all."""
    if stop is None:
        return {}
    listed = [stop] if isinstance(stop, str) else stop
    if isinstance(listed, list) and listed and all(isinstance(item, str) for item in listed):
        return {"stop_strings": listed}
    if isinstance(listed, list) and all(type(item) is int for item in listed):
        return {"stop_tokens": listed}
    raise InvalidInput("neither strings nor token ids", remedy="Send one kind.", field="stop")

"""Tinker API: requests that become commands of one model. Each is answered at once with the id of its future.

What is wrong with a request fails its future, never the request: a client that is refused a turn waits for ever.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from tinsmith.api.http.fields import field, maybe, optional
from tinsmith.api.http.gateway import Gateway
from tinsmith.api.http.responses import PROTOBUF, json_response, read_object
from tinsmith.api.http.tenancy.names import (
    TinkerPath,
    external_name,
    given_name,
    model_id,
    parse_path,
    request_id,
    unnamed_sampler_id,
)
from tinsmith.api.http.tenancy.records import ModelRecord, SamplerRecord, SaveRecord
from tinsmith.api.http.tinker.copies import life_of, refuse_token
from tinsmith.api.http.tinker.encoding.batches import Batch, decompress, read_json, read_proto
from tinsmith.api.http.tinker.startup import gateway_of
from tinsmith.bus.protocol.commands import CreateModelArgs, LoraSpec
from tinsmith.bus.protocol.envelope import Command, Kind
from tinsmith.bus.protocol.errors import InvalidInput, TinsmithError, UnknownVersion

router = APIRouter(prefix="/api/v1")

DECODE_INLINE_BYTES = 200_000
"""A batch larger than this is read in a thread, so that others are answered meanwhile."""


@router.post("/create_model")
async def create_model(request: Request) -> Response:
    """A new model of a session of the caller's."""
    gateway, body = gateway_of(request), await read_object(request)
    model = model_id(field(body, "session_id", str), field(body, "model_seq_id", int))
    try:
        owner = (await gateway.session(request, field(body, "session_id", str))).owner
        _check_optimizer(body)
        lora = maybe(body, "lora_config", dict[str, Any])
        if lora is None:
            raise InvalidInput("a model without lora_config can't be made here", field="lora_config")
        spec = LoraSpec.model_validate(
            {
                "rank": field(lora, "rank", int),
                "seed": optional(lora, "seed", int, 0),
                "attn": optional(lora, "train_attn", bool, True),
                "mlp": optional(lora, "train_mlp", bool, True),
                "unembed": optional(lora, "train_unembed", bool, True),
            }
        )
        base = gateway.settings.base(body.get("base_model"))
        record = ModelRecord(owner=owner, created=time.time(), base=base, lora=spec, user_metadata=_metadata(body))
        return await _create(gateway, model, record)
    except ValueError as error:
        return _future(await gateway.refuse(InvalidInput(str(error), field="lora_config")), model)
    except InvalidInput as error:
        return _future(await gateway.refuse(error), model)


@router.post("/load_weights")
async def load_weights(request: Request) -> Response:
    """Load a checkpoint into a model, or (with session_id) make a model that begins with it."""
    gateway, body = gateway_of(request), await read_object(request)
    if body.get("session_id") is None:
        return await _turn(request, body, Kind.LOAD, _load_args)
    session = field(body, "session_id", str)
    model = model_id(session, field(body, "model_seq_id", int))
    try:
        owner = (await gateway.session(request, session)).owner
        _check_optimizer(body)
        refuse_token(body.get("weights_access_token"))
        path = parse_path(body.get("path"), "weights")
        base = (await gateway.readable(request, path)).base
        saved = await asyncio.to_thread(_saved_args, gateway, path)
        if body.get("base_model") is not None:
            base = gateway.settings.base(body["base_model"])
        if saved.lora is None:
            raise InvalidInput(f"{path} has no adapter", field="path")
        record = ModelRecord(
            owner=owner, created=time.time(), base=base, lora=saved.lora, user_metadata=_metadata(body)
        )
        return await _create(gateway, model, record, path.place, optional(body, "optimizer", bool, False))
    except InvalidInput as error:
        return _future(await gateway.refuse(error), model)


@router.post("/forward_backward")
@router.post("/forward")
async def forward_backward(request: Request) -> Response:
    """A batch: protobuf (zstd too), or JSON from clients before 0.25."""
    gateway = gateway_of(request)
    raw = await request.body()
    plain = decompress(raw, request.headers.get("content-encoding", ""))
    if request.headers.get("content-type", "").startswith(PROTOBUF):
        batch = await _aside(plain, read_proto)
    else:
        kind = Kind.FORWARD if request.url.path.endswith("/forward") else Kind.FORWARD_BACKWARD
        batch = await _aside(plain, lambda body: read_json(_object(body), kind))
    command = await _command(request, batch.model, batch.seq, batch.kind, batch.args, batch.lengths)
    return _future(await gateway.submit(command, batch.body, batch.error), batch.model)


@router.post("/optim_step")
async def optim_step(request: Request) -> Response:
    """One AdamW step."""
    return await _turn(request, await read_object(request), Kind.OPTIM_STEP, _optim_args)


@router.post("/save_weights")
async def save_weights(request: Request) -> Response:
    """A checkpoint: weights and optimizer."""
    body = await read_object(request)
    response = await _turn(request, body, Kind.SAVE, _save_args)
    await _note_save(gateway_of(request), body, "weights")
    return response


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(request: Request) -> Response:
    """A version to sample from: under the client's name, or as a sampling session of its own."""
    gateway, body = gateway_of(request), await read_object(request)
    response = await _turn(request, body, Kind.PUBLISH, _publish_args)
    if body.get("path") is not None:
        await _note_save(gateway, body, "sampler_weights")
        return response
    model, seq = field(body, "model_id", str), field(body, "seq_id", int)
    run = await gateway.store.model(model)
    if run is not None:
        record = SamplerRecord(owner=run.owner, base=run.base, version=f"{model}/{given_name(None, seq)}")
        await gateway.store.put_sampler(unnamed_sampler_id(model, seq), record)
    return response


@router.post("/save_weights_external")
async def save_weights_external(request: Request) -> Response:
    """A version to download, in a format that other programs load."""
    body = await read_object(request)
    response = await _turn(request, body, Kind.PUBLISH, _external_args)
    await _note_save(gateway_of(request), body, "external_weights")
    return response


@router.post("/get_info")
async def get_info(request: Request) -> Response:
    """What a model is."""
    gateway, body = gateway_of(request), await read_object(request)
    model = field(body, "model_id", str)
    run = await gateway.model(request, model)
    status = await gateway.status()
    data = {"arch": (status or {}).get("trainer", {}).get("architecture"), "model_name": run.base}
    data["tokenizer_id"] = gateway.settings.tokenizer
    return json_response(
        {
            "type": "get_info",
            "model_id": model,
            "model_data": {key: value for key, value in data.items() if value is not None},
            "is_lora": True,
            "lora_rank": run.lora.rank,
            "model_name": run.base,
            "optimizer_config": {"type": "adamw"},
        }
    )


async def _create(
    gateway: Gateway, model: str, record: ModelRecord, checkpoint: str | None = None, optimizer: bool = False
) -> Response:
    args: dict[str, Any] = {"base": gateway.settings.alias, "lora": record.lora.model_dump()}
    if checkpoint is not None:
        args.update(checkpoint=checkpoint, optimizer=optimizer)
    try:
        command = Command(id=request_id(model, 0), model=model, kind=Kind.CREATE_MODEL, seq=0, args=args)
    except ValueError:
        raise InvalidInput(f"{model!r} can't be a model's id", field="model_seq_id") from None
    await gateway.store.put_model(model, record)
    return _future(await gateway.submit(command), model)


async def _turn(request: Request, body: Mapping[str, Any], kind: Kind, read: Any) -> Response:
    """Take a turn of a model; `read` makes the arguments of the body, or raises why not."""
    gateway = gateway_of(request)
    model, seq = field(body, "model_id", str), field(body, "seq_id", int)
    args: dict[str, Any] = {}
    error: TinsmithError | None = None
    try:
        args = await read(gateway, request, body)
    except InvalidInput as wrong:
        error = wrong
    command = await _command(request, model, seq, kind, args)
    return _future(await gateway.submit(command, error=error), model)


async def _command(
    request: Request, model: str, seq: int, kind: Kind, args: dict[str, Any], lengths: tuple[int, ...] = ()
) -> Command:
    await gateway_of(request).check_owner(request, model)
    if seq < 1:
        raise InvalidInput(f"a model's requests are numbered from 1, not {seq}", field="seq_id")
    try:
        return Command(id=request_id(model, seq), model=model, kind=kind, seq=seq, args=args, lengths=lengths)
    except ValueError:
        raise InvalidInput(f"{model!r} can't be a model's id", field="model_id") from None


def _future(request: str, model: str) -> Response:
    return json_response({"request_id": request, "model_id": model})


async def _aside(body: bytes, read: Any) -> Batch:
    batch: Batch = await asyncio.to_thread(read, body) if len(body) > DECODE_INLINE_BYTES else read(body)
    return batch


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except ValueError as error:
        raise InvalidInput(f"the body is not JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def _metadata(body: Mapping[str, Any]) -> dict[str, Any] | None:
    return maybe(body, "user_metadata", dict[str, Any])


def _check_optimizer(body: Mapping[str, Any]) -> None:
    config = optional(body, "optimizer_config", dict[str, Any], {"type": "adamw"})
    if config.get("type") != "adamw":
        raise InvalidInput(
            f"the optimizer {config.get('type')!r} is not known", remedy="Use adamw.", field="optimizer_config"
        )


async def _optim_args(gateway: Gateway, request: Request, body: Mapping[str, Any]) -> dict[str, Any]:
    params = body.get("adam_params")
    if not isinstance(params, dict):
        raise InvalidInput("only AdamW is known", remedy="Send adam_params.", field="adam_params")
    args = {"lr" if name == "learning_rate" else name: value for name, value in params.items()}
    return {name: float(value) if type(value) is int else value for name, value in args.items()}


async def _save_args(gateway: Gateway, request: Request, body: Mapping[str, Any]) -> dict[str, Any]:
    life_of(maybe(body, "ttl_seconds", int))
    name = given_name(body.get("path"), field(body, "seq_id", int))
    return {"name": name, "overwrite": optional(body, "overwrite", bool, False)}


async def _publish_args(gateway: Gateway, request: Request, body: Mapping[str, Any]) -> dict[str, Any]:
    life_of(maybe(body, "ttl_seconds", int))
    return {"name": given_name(body.get("path"), field(body, "seq_id", int))}


async def _external_args(gateway: Gateway, request: Request, body: Mapping[str, Any]) -> dict[str, Any]:
    if body.get("age_encryption_recipients"):
        raise InvalidInput(
            "this service does not encrypt what it exports",
            remedy="Leave it out, and encrypt the files that you download.",
            field="age_encryption_recipients",
        )
    life_of(maybe(body, "ttl_seconds", int))
    return {"name": external_name(body.get("path"), field(body, "seq_id", int))}


async def _load_args(gateway: Gateway, request: Request, body: Mapping[str, Any]) -> dict[str, Any]:
    refuse_token(body.get("weights_access_token"))
    path = parse_path(body.get("path"), "weights")
    await gateway.readable(request, path)
    return {"checkpoint": path.place, "optimizer": optional(body, "optimizer", bool, False)}


def _saved_args(gateway: Gateway, path: TinkerPath) -> CreateModelArgs:
    """With which arguments a checkpoint's model was made. Raises UnknownVersion."""
    try:
        text = (gateway.settings.folder(path.kind, path.place) / "meta.json").read_text()
        return CreateModelArgs.model_validate(json.loads(text)["args"])
    except (OSError, ValueError, KeyError):
        raise UnknownVersion(
            f"there is no {path}, or it can't be read", remedy="Use a path that save_weights returned.", field="path"
        ) from None


async def _note_save(gateway: Gateway, body: Mapping[str, Any], kind: Any) -> None:
    """Remember what the client said of a checkpoint; once for each turn, however often it is sent."""
    model, seq = field(body, "model_id", str), field(body, "seq_id", int)
    try:
        name = given_name(body.get("path"), seq)
        ttl = life_of(maybe(body, "ttl_seconds", int))
        metadata = maybe(body, "user_metadata", dict[str, str])
    except InvalidInput:
        return  # Its future has failed for it.
    if await gateway.store.model(model) is None:
        return  # Nobody's: nothing can be said of it.
    now = time.time()
    record = SaveRecord(seq=seq, at=now, expires_at=now + ttl if ttl is not None else None, user_metadata=metadata)
    place = TinkerPath(model, kind, name).stored.checkpoint_id
    known = (await gateway.store.saves(model)).get(place, [])
    if all(other.seq != seq for other in known):
        await gateway.store.put_saves(model, place, [*known, record])

"""The plain API under /v1: any command in, its event and arrays out, as JSON or msgpack; events as they come.

    POST /v1/commands        {model, kind, args?, seq?, id?, data? | prompt? | body?}  ->  {id, seq, state}
    GET  /v1/commands/ID     ?wait=SECONDS  ->  {event, arrays}, or 202 {id, state} while it is on its way
    GET  /v1/events          ?models=A,B&since=$|0|ID  ->  server-sent events; Last-Event-ID goes on where it broke off

data: a list of {tokens, <loss input>: [...]}; prompt: token ids; body (msgpack only): a frame made elsewhere.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgpack
import numpy as np
from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse

from tinsmith.api.http.fields import field, maybe, optional, token_array
from tinsmith.api.http.gateway import Gateway
from tinsmith.api.http.responses import HttpError, json_response, read_object
from tinsmith.api.http.tenancy.names import owned_id
from tinsmith.api.http.tenancy.records import ModelRecord
from tinsmith.api.http.tinker.startup import gateway_of
from tinsmith.bus.events import Streamed
from tinsmith.bus.protocol.codec import decode, encode, unpack_ragged
from tinsmith.bus.protocol.commands import parse_args
from tinsmith.bus.protocol.datum import Datum, pack_datums
from tinsmith.bus.protocol.envelope import CONTROL_LANE, LANES, SAMPLE_LANE, Command, Kind
from tinsmith.bus.protocol.errors import DeadlineExceeded, Gap, InvalidDatum, InvalidInput

router = APIRouter(prefix="/v1")

MSGPACK = "application/msgpack"
LANE_OF = {Kind.SAMPLE: SAMPLE_LANE, Kind.CANCEL: CONTROL_LANE}
"""Queues of the kinds that belong to no model."""


@router.post("/commands")
async def submit(request: Request) -> Response:
    """Accept a command; what is wrong with it is told at once."""
    gateway, content = gateway_of(request), await _read(request)
    try:
        kind = Kind(field(content, "kind", str))
    except ValueError:
        raise InvalidInput("no such kind", remedy=f"Use one of {', '.join(Kind)}.", field="kind") from None
    model = LANE_OF[kind] if kind in LANE_OF else field(content, "model", str)
    args = optional(content, "args", dict[str, Any], {})
    parsed = parse_args(kind, args)
    body, lengths = _body(content)
    await _check(gateway, request, model, parsed)
    seq = optional(content, "seq", int, 0 if kind is Kind.CREATE_MODEL else -1)
    try:
        name = maybe(content, "id", str) or owned_id(gateway.owner(request))
        await gateway.check_owner(request, name)
        command = Command(id=name, model=model, kind=kind, seq=seq, args=args, lengths=lengths)
    except ValueError as error:
        raise InvalidInput(str(error)) from None
    submitted = await gateway.inbox.submit(command, body)
    if kind is Kind.CREATE_MODEL and parsed.lora is not None:
        # Only now: whoever is refused the name must not own it.
        record = ModelRecord(owner=gateway.owner(request), created=time.time(), base=parsed.base, lora=parsed.lora)
        await gateway.store.put_model(model, record)
    return _respond(request, {"id": command.id, "seq": submitted.seq, "state": submitted.state}, 202)


@router.get("/commands/{command}")
async def result(request: Request, command: str, wait: float = 0.0) -> Response:
    """What became of a command, waited for `wait` seconds (60 at most)."""
    gateway = gateway_of(request)
    await gateway.check_owner(request, command)
    try:
        event, body = await gateway.outcome(command, min(max(wait, 0.001), 60.0))
    except DeadlineExceeded:
        return _respond(request, {"id": command, "state": "pending"}, 202)
    await gateway.check_owner(request, event.model)
    arrays = decode(body) if body else None
    return _respond(request, {"event": event.model_dump(mode="json"), "arrays": _plain(arrays)})


@router.get("/events")
async def events(request: Request, models: str | None = None, since: str = "$") -> Response:
    """Events of the caller's models as they come, or from a point on; the id of each is `model/place`."""
    gateway, owner = gateway_of(request), gateway_of(request).owner(request)
    names = [name for name in models.split(",") if name] if models else None
    for name in names or ():
        await gateway.check_owner(request, name)
    start: str | Mapping[str, str] = since
    if last := request.headers.get("last-event-id"):
        model, _, place = last.rpartition("/")
        start = {model: place}
    return StreamingResponse(_stream(gateway, owner, names, start), media_type="text/event-stream")


async def _stream(
    gateway: Gateway, owner: str, models: list[str] | None, since: str | Mapping[str, str]
) -> AsyncIterator[bytes]:
    yield b": tinsmith events\n\n"
    async for item in gateway.bus.events(models, since):
        model = item.model or ""
        if not await _visible(gateway, owner, model, item):
            continue
        if isinstance(item, Gap):
            yield f"event: gap\ndata: {json.dumps(item.to_wire())}\n\n".encode()
        else:
            data = json.dumps({**item.event.model_dump(mode="json"), "at": item.at})
            yield f"id: {model}/{item.id}\nevent: {item.event.kind.value}\ndata: {data}\n\n".encode()


async def _visible(gateway: Gateway, owner: str, model: str, item: Streamed | Gap) -> bool:
    """Whether a model, or what a lane did for somebody, is the caller's; a model that belongs to nobody is for all."""
    if model not in LANES:
        return await gateway.owner_of(model) in (None, owner)
    return isinstance(item, Gap) or await gateway.owner_of(item.event.id) == owner


async def _check(gateway: Gateway, request: Request, model: str, args: Any) -> None:
    """Raise UnknownModel when what a command is about is another tenant's."""
    for name in (model, *(getattr(args, place, None) for place in ("version", "checkpoint", "command"))):
        if name not in (None, "base", *LANES):
            await gateway.check_owner(request, str(name).partition("/")[0])


def _body(content: Mapping[str, Any]) -> tuple[bytes, tuple[int, ...]]:
    if content.get("prompt") is not None:
        return encode({"prompt": token_array(field(content, "prompt", list[int]))}), ()
    if content.get("body") is not None:
        lengths = tuple(optional(content, "lengths", list[int], []))
        return field(content, "body", bytes), lengths
    if content.get("data") is None:
        return b"", ()
    datums = []
    for at, item in enumerate(field(content, "data", list[dict[str, Any]])):
        try:
            datums.append(Datum(item.get("tokens", []), {key: it for key, it in item.items() if key != "tokens"}))
        except InvalidDatum as error:
            error.datum = at
            raise
    return pack_datums(datums)


async def _read(request: Request) -> dict[str, Any]:
    if not request.headers.get("content-type", "").startswith(MSGPACK):
        return await read_object(request)
    try:
        found = msgpack.unpackb(await request.body(), strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise HttpError(400, f"the body is not msgpack: {error}") from None
    if not isinstance(found, dict):
        raise HttpError(400, "the body is not a map")
    return found


def _respond(request: Request, content: dict[str, Any], status: int = 200) -> Response:
    if MSGPACK in request.headers.get("accept", ""):
        return Response(msgpack.packb(content), status, media_type=MSGPACK)
    return json_response(content, status)


def _plain(tree: Any) -> Any:
    """Arrays as lists; ragged columns as one list for each datum."""
    if isinstance(tree, dict):
        if set(tree) == {"values", "rows", "cols"}:
            return [None if array is None else array.tolist() for array in unpack_ragged(tree)]
        return {key: _plain(value) for key, value in tree.items()}
    return tree.tolist() if isinstance(tree, np.ndarray) else tree

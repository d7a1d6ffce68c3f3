"""Tinker API: what became of a request, or of any of a sampling session's, held until it is known."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from tinsmith.api.http.fields import field, maybe, optional
from tinsmith.api.http.responses import PROTOBUF, HttpError, json_response, proto_response, read_object
from tinsmith.api.http.tenancy.names import REFUSED_PREFIX
from tinsmith.api.http.tinker.encoding.results import PROTO_KINDS, as_json, as_proto
from tinsmith.api.http.tinker.startup import gateway_of
from tinsmith.bus.protocol.envelope import LANES, Kind
from tinsmith.bus.protocol.errors import BusUnreachable, DeadlineExceeded, UnknownCommand

router = APIRouter(prefix="/api/v1")


@router.post("/retrieve_future")
async def retrieve_future(request: Request) -> Response:
    """The result; 408 when it is not there yet after half a minute, 410 when it is no longer kept."""
    gateway, body = gateway_of(request), await read_object(request)
    name = field(body, "request_id", str)
    if not name.startswith(REFUSED_PREFIX):
        await gateway.check_owner(request, name)
    try:
        event, result = await gateway.outcome(name, gateway.settings.poll_seconds)
        if event.model not in LANES and not name.startswith(REFUSED_PREFIX):
            await gateway.check_owner(request, event.model)
        if event.kind in (Kind.SAVE, Kind.PUBLISH) and not event.ok:
            await gateway.store.forget_save(event.model, name)
        if event.kind is Kind.CREATE_MODEL and not event.ok:
            await gateway.store.drop_model(event.model)
        if event.ok and event.kind in PROTO_KINDS and PROTOBUF in request.headers.get("accept", ""):
            return proto_response(as_proto(event, result))
        return json_response(as_json(event, result))
    except (DeadlineExceeded, BusUnreachable):
        pending = {"type": "try_again", "request_id": name, "queue_state": "active", "queue_state_reason": None}
        return json_response(pending, 408)
    except UnknownCommand as error:
        raise HttpError(410, str(error)) from None


@router.post("/cancel_future")
async def cancel_future(request: Request) -> Response:
    """Stop a sample and free its place; its future fails as cancelled. What has ended stays as it ended."""
    gateway, name = gateway_of(request), field(await read_object(request), "request_id", str)
    if not name.startswith(REFUSED_PREFIX):
        await gateway.check_owner(request, name)
        await gateway.cancel(name)
    return json_response({})


@router.post("/retrieve_futures")
async def retrieve_futures(request: Request) -> Response:
    """Samples of one sampling session that ended since `prev_cursor`."""
    gateway, body = gateway_of(request), await read_object(request)
    target = field(body, "target", dict[str, Any])
    sampler = field(target, "sampling_session_id", str)
    await gateway.check_owner(request, sampler)
    cursor = optional(body, "prev_cursor", int, 0)
    seconds = min(optional(body, "timeout", float, gateway.settings.poll_seconds), gateway.settings.poll_seconds)
    whose = sampler, maybe(target, "cloned_sampler_id", int) or 0
    ended = await gateway.completions.after(whose, cursor, seconds)
    completions = [
        {"state": "finished", "request_id": event.id, "response_payload_uncompressed_size": event.body_bytes}
        if event.ok
        else {"state": "failed", "request_id": event.id}
        for event in ended
    ]
    return json_response({"completions": completions, "cursor": ended[-1].n if ended else cursor})

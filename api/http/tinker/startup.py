"""Tinker API: start-up, sessions, telemetry, and what the server can do."""

from __future__ import annotations

import time
from typing import Any, Literal

from fastapi import APIRouter, Request, Response

from tinsmith.api.http.fields import field, maybe, optional
from tinsmith.api.http.gateway import Gateway
from tinsmith.api.http.responses import HttpError, json_response, read_object
from tinsmith.api.http.tenancy.names import is_name, new_session_id, parse_path, sampling_session_id
from tinsmith.api.http.tenancy.records import DEFAULT_PROJECT, FinishRecord, SamplerRecord, SessionRecord
from tinsmith.bus.protocol.errors import InvalidInput, UnknownVersion

router = APIRouter(prefix="/api/v1")

FinishReason: Any = Literal["success", "errored", "interrupted"]


def project_named(name: object) -> str:
    """The name of a project: a label on sessions, which begins to exist with its first. Raises InvalidInput."""
    if not isinstance(name, str) or not is_name(name):
        raise InvalidInput(
            f"{name!r} can't name a project",
            remedy="Use letters, digits and . _ : @ - (128 at most), a letter or digit first.",
            field="project_id",
        )
    return name


def gateway_of(request: Request) -> Gateway:
    """The replica's hold on the bus."""
    gateway: Gateway = request.app.state.gateway
    return gateway


@router.post("/client/config")
async def client_config(request: Request) -> Response:
    """What the client may do: large requests come compressed, one request waits for all samples of a session, and a
    client that was copied to another process asks for a number of its own."""
    gateway_of(request).owner(request)
    flags = ("proto_compress_fwdbwd", "sample_use_retrieve_futures", "sample_join_sampling_session")
    return json_response(dict.fromkeys(flags, True))


@router.post("/client/dynamic_config")
async def dynamic_config(request: Request) -> Response:
    """A sample that nobody waits for any more is to be cancelled."""
    return json_response({"sample_cancel_enabled": True})


@router.get("/healthz")
async def healthz() -> Response:
    """The replica answers; /health tells more."""
    return json_response({"status": "ok"})


@router.get("/get_server_capabilities")
async def capabilities(request: Request) -> Response:
    """The base model under each of its names."""
    gateway = gateway_of(request)
    gateway.owner(request)
    context = await gateway.context()
    models = [
        {"model_name": name, "max_context_length": context, "trainable": True, "sampleable": True}
        for name in gateway.settings.names
    ]
    return json_response({"supported_models": models})


@router.post("/create_session")
async def create_session(request: Request) -> Response:
    """A new session of the caller's."""
    gateway = gateway_of(request)
    owner, body = gateway.owner(request), await read_object(request)
    session = new_session_id()
    record = SessionRecord(
        owner=owner,
        created=time.time(),
        tags=tuple(optional(body, "tags", list[str], [])),
        user_metadata=maybe(body, "user_metadata", dict[str, Any]),
        display_name=maybe(body, "display_name", str),
        project=project_named(body.get("project_id") or DEFAULT_PROJECT),
    )
    await gateway.store.put_session(session, record)
    return json_response({"type": "create_session", "session_id": session})


@router.post("/session_heartbeat")
async def session_heartbeat(request: Request) -> Response:
    """The client lives. 410 when the session is over."""
    gateway, body = gateway_of(request), await read_object(request)
    session = field(body, "session_id", str)
    await gateway.check_owner(request, session)
    if not await gateway.store.heartbeat(session, time.time()):
        raise HttpError(410, f"session {session} is over")
    return json_response({"type": "session_heartbeat"})


@router.post("/sessions/{session}/finish")
async def finish(request: Request, session: str) -> Response:
    """The client says good-bye; its models go a while after the last heartbeat."""
    gateway = gateway_of(request)
    await gateway.check_owner(request, session)
    body = await read_object(request)
    reason = optional(body, "reason", dict[str, Any], {})
    how = FinishRecord(
        reason=optional(reason, "type", FinishReason, "success"),
        detail=maybe(body, "detail", str),
    )
    if await gateway.store.last_seen(session) is not None:
        await gateway.store.finish(session, how)
    return json_response({})


@router.post("/join_sampling_session")
async def join_sampling_session(request: Request) -> Response:
    """A number of its own for a client that was copied to another process."""
    gateway, body = gateway_of(request), await read_object(request)
    sampler = field(body, "sampling_session_id", str)
    await gateway.check_owner(request, sampler)
    if await gateway.store.sampler(sampler) is None:
        raise UnknownVersion(f"there is no sampling session {sampler!r}", remedy="Create it; it may be over.")
    return json_response({"type": "join_sampling_session", "client_counter": await gateway.store.join(sampler)})


@router.post("/telemetry")
async def telemetry(request: Request) -> Response:
    """Accepted and not kept."""
    return json_response({"status": "accepted"})


@router.post("/create_sampling_session")
async def create_sampling_session(request: Request) -> Response:
    """A sampling session over the base model, or over a published version of the caller's or a public one."""
    gateway, body = gateway_of(request), await read_object(request)
    session = field(body, "session_id", str)
    owner = (await gateway.session(request, session)).owner
    sampler = sampling_session_id(session, field(body, "sampling_session_seq_id", int))
    path = maybe(body, "model_path", str)
    if path is None:
        record = SamplerRecord(owner=owner, base=gateway.settings.base(body.get("base_model")), version="base")
    else:
        parsed = parse_path(path, "sampler_weights")
        run = await gateway.readable(request, parsed)
        if not gateway.settings.folder(parsed.kind, parsed.place).is_dir():
            raise UnknownVersion(f"there is no {path}", remedy="Wait until it is saved, or use one that is.")
        record = SamplerRecord(owner=owner, base=run.base, version=parsed.place, model_path=path)
    await gateway.store.put_sampler(sampler, record)
    return json_response({"type": "create_sampling_session", "sampling_session_id": sampler})

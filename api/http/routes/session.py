"""Tinker API: start-up, sessions, telemetry, and what the server can do."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from tinsmith.api.http.door import Door
from tinsmith.api.http.fields import field, maybe, optional
from tinsmith.api.http.names import new_session_id, parse_path, sampling_session_id
from tinsmith.api.http.records import SamplerRecord, SessionRecord
from tinsmith.api.http.responses import HttpError, json_response, read_object
from tinsmith.bus.errors import UnknownVersion

router = APIRouter(prefix="/api/v1")


def door_of(request: Request) -> Door:
    """The replica's hold on the bus."""
    door: Door = request.app.state.door
    return door


@router.post("/client/config")
async def client_config(request: Request) -> Response:
    """What the client may do: large requests come compressed, one request waits for all samples of a session."""
    door_of(request).owner(request)
    return json_response({"proto_compress_fwdbwd": True, "sample_use_retrieve_futures": True})


@router.post("/client/dynamic_config")
async def dynamic_config(request: Request) -> Response:
    """Nothing differs from the client's defaults."""
    return json_response({})


@router.get("/healthz")
async def healthz() -> Response:
    """The replica answers; /health tells more."""
    return json_response({"status": "ok"})


@router.get("/get_server_capabilities")
async def capabilities(request: Request) -> Response:
    """The base model under each of its names."""
    door = door_of(request)
    door.owner(request)
    context = await door.context()
    models = [
        {"model_name": name, "max_context_length": context, "trainable": True, "sampleable": True}
        for name in door.settings.names
    ]
    return json_response({"supported_models": models})


@router.post("/create_session")
async def create_session(request: Request) -> Response:
    """A new session of the caller's."""
    door = door_of(request)
    owner, body = door.owner(request), await read_object(request)
    session = new_session_id()
    record = SessionRecord(
        owner=owner,
        created=time.time(),
        tags=tuple(optional(body, "tags", list[str], [])),
        user_metadata=maybe(body, "user_metadata", dict[str, Any]),
        display_name=maybe(body, "display_name", str),
    )
    await door.store.put_session(session, record)
    return json_response({"type": "create_session", "session_id": session})


@router.post("/session_heartbeat")
async def session_heartbeat(request: Request) -> Response:
    """The client lives. 410 when the session is over."""
    door, body = door_of(request), await read_object(request)
    session = field(body, "session_id", str)
    await door.check_owner(request, session)
    if not await door.store.heartbeat(session, time.time()):
        raise HttpError(410, f"session {session} is over")
    return json_response({"type": "session_heartbeat"})


@router.post("/sessions/{session}/finish")
async def finish(request: Request, session: str) -> Response:
    """The client says good-bye; its models go a while after the last heartbeat."""
    door = door_of(request)
    await door.check_owner(request, session)
    await door.store.finish(session)
    return json_response({})


@router.post("/telemetry")
async def telemetry(request: Request) -> Response:
    """Accepted and not kept."""
    return json_response({"status": "accepted"})


@router.post("/create_sampling_session")
async def create_sampling_session(request: Request) -> Response:
    """A sampling session over the base model, or over a published version of the caller's or a public one."""
    door, body = door_of(request), await read_object(request)
    session = field(body, "session_id", str)
    owner = (await door.session(request, session)).owner
    sampler = sampling_session_id(session, field(body, "sampling_session_seq_id", int))
    path = maybe(body, "model_path", str)
    if path is None:
        record = SamplerRecord(owner=owner, base=door.settings.base(body.get("base_model")), version="base")
    else:
        parsed = parse_path(path, "sampler_weights")
        run = await door.readable(request, parsed)
        if not door.settings.folder(parsed.kind, parsed.place).is_dir():
            raise UnknownVersion(f"there is no {path}", remedy="Wait until it is saved, or use one that is.")
        record = SamplerRecord(owner=owner, base=run.base, version=parsed.place, model_path=path)
    await door.store.put_sampler(sampler, record)
    return json_response({"type": "create_sampling_session", "sampling_session_id": sampler})

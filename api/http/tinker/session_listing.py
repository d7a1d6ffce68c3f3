"""Tinker API: sessions as RestClient lists, searches and files them."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from tinsmith.api.http.fields import field
from tinsmith.api.http.gateway import Gateway
from tinsmith.api.http.responses import json_response, read_object
from tinsmith.api.http.retention.catalog import saved
from tinsmith.api.http.tenancy.records import SessionRecord
from tinsmith.api.http.tinker.encoding.search import Found, as_text, page, read_search
from tinsmith.api.http.tinker.startup import gateway_of, project_named
from tinsmith.bus.protocol.errors import InvalidInput, UnknownModel

router = APIRouter(prefix="/api/v1")


@router.get("/sessions")
async def sessions(request: Request, limit: int = 20, offset: int = 0) -> Response:
    """The caller's living ones, those heard from last first."""
    gateway, owner = gateway_of(request), gateway_of(request).owner(request)
    window = window_of(limit, offset)
    mine = []
    for session in await gateway.store.sessions():
        record = await gateway.store.session(session)
        if record is not None and record.owner == owner:
            mine.append(session)
    return json_response({"sessions": mine[window]})


@router.post("/sessions/search")
async def search_sessions(request: Request) -> Response:
    """The caller's that fit, over or not, newest first."""
    gateway, owner = gateway_of(request), gateway_of(request).owner(request)
    search = read_search(await read_object(request))
    found, cursor = page(search, owner, [Found(*each) for each in await gateway.store.remembered()])
    return json_response({"sessions": [await _summary(gateway, one) for one in found], "next_cursor": cursor})


@router.get("/sessions/{session}")
async def session_info(request: Request, session: str) -> Response:
    """What belongs to a session, over or not."""
    gateway, record = gateway_of(request), await own_session(request, session)
    return json_response(
        {
            "training_run_ids": await gateway.store.models(session),
            "sampler_ids": await gateway.store.samplers(session),
            "user_metadata": as_text(record.user_metadata),
            "display_name": record.display_name,
        }
    )


@router.put("/sessions/{session}/project")
async def assign_project(request: Request, session: str) -> Response:
    """Move a session, over or not, and with it its training runs, into a project."""
    project = project_named(field(await read_object(request), "project_id", str))
    await own_session(request, session)
    await gateway_of(request).store.move(session, project)
    return json_response({})


def window_of(limit: int, offset: int) -> slice:
    """A page of a list. Raises InvalidInput."""
    if limit < 0 or offset < 0:
        raise InvalidInput(
            f"limit {limit} and offset {offset} are no page",
            remedy="Send numbers that are not negative.",
            field="limit" if limit < 0 else "offset",
        )
    return slice(offset, offset + limit)


async def own_session(request: Request, session: str) -> SessionRecord:
    """A session of the caller's, over or not. Raises UnknownModel."""
    gateway = gateway_of(request)
    record = await gateway.store.session(session)
    if record is None or record.owner != gateway.owner(request):
        raise UnknownModel(f"there is no session {session!r}", remedy="It may be forgotten: it had no checkpoints.")
    return record


async def _summary(gateway: Gateway, one: Found) -> dict[str, object]:
    """A SessionSummary of the Tinker API."""
    everything = [
        each
        for model in await gateway.store.models(one.session)
        for each in await asyncio.to_thread(saved, gateway.settings, model, await gateway.store.saves(model))
    ]
    return {
        "session_id": one.session,
        "created_at": one.created.isoformat(),
        "owner": one.record.owner,
        "project_id": one.record.project,
        "status": one.status,
        "checkpoints_count": len(everything),
        "checkpoint_storage_bytes": sum(each.size for each in everything),
        "display_name": one.record.display_name,
        "user_metadata": one.metadata,
    }

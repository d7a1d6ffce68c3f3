"""Tinker API: a session's timeline to download, made of the events that the bus keeps."""

from __future__ import annotations

import json

from fastapi import APIRouter, Request, Response

from tinsmith.api.http.door import Door
from tinsmith.api.http.responses import HttpError, json_response
from tinsmith.api.http.routes.session import door_of
from tinsmith.api.http.routes.sessions import own_session
from tinsmith.api.http.signed import expiry, is_signed, signature
from tinsmith.api.http.wire.trace import timeline
from tinsmith.bus.envelope import SAMPLE_LANE
from tinsmith.bus.errors import Gap
from tinsmith.bus.events import Streamed

router = APIRouter(prefix="/api/v1")


@router.get("/sessions/{session}/trace_export")
async def trace_export(request: Request, session: str) -> Response:
    """Where it can be fetched, without a key, for an hour."""
    await own_session(request, session)
    expires, secret = expiry(), await door_of(request).store.secret()
    if await _timeline(door_of(request), session) is None:
        return json_response({"status": "failed", "error": "the bus keeps no events of this session, or has none yet"})
    sign = signature(secret, f"trace/{session}", expires)
    url = f"{request.base_url}api/v1/session_traces/{session}?expires={expires}&signature={sign}"
    return json_response({"status": "ready", "url": url})


@router.get("/session_traces/{session}")
async def session_trace(request: Request, session: str, expires: int = 0, signature: str = "") -> Response:
    """The timeline as it is now, for whoever has the address."""
    door = door_of(request)
    if not is_signed(await door.store.secret(), f"trace/{session}", expires, signature):
        raise HttpError(403, "this address is not valid, or no longer; ask for a new one")
    trace = await _timeline(door, session)
    if trace is None:
        raise HttpError(404, "the bus no longer keeps events of this session")
    return Response(json.dumps(trace, separators=(",", ":")), media_type="application/json")


async def _timeline(door: Door, session: str) -> dict[str, object] | None:
    """Made of every event up to now."""
    models = [*await door.store.models(session), SAMPLE_LANE]
    keys = door.bus.session.keys
    newest = await door.bus.session.call(*(("XREVRANGE", keys.events(it), "+", "-", "COUNT", 1) for it in models))
    # A stream without entries has no last one to wait for.
    last = {model: _place(entry[0][0].decode()) for model, entry in zip(models, newest, strict=True) if entry}
    items: list[Streamed | Gap] = []
    if last:
        async for item in door.bus.events(sorted(last), "0"):
            items.append(item)
            if isinstance(item, Streamed) and _place(item.id) >= last.get(item.model, (0, 0)):
                last.pop(item.model, None)
                if not last:
                    break
    return timeline(session, items)


def _place(text: str) -> tuple[int, int]:
    birth, _, n = text.partition("-")
    return int(birth), int(n)

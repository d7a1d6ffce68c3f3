"""Tinker API: a session's timeline to download, made of the events that the bus keeps."""

from __future__ import annotations

import json

from fastapi import APIRouter, Request, Response

from tinsmith.api.http.gateway import Gateway
from tinsmith.api.http.responses import HttpError, json_response
from tinsmith.api.http.tenancy.signed import expiry, is_signed, signature
from tinsmith.api.http.tinker.encoding.timeline import timeline
from tinsmith.api.http.tinker.session_listing import own_session
from tinsmith.api.http.tinker.startup import gateway_of
from tinsmith.bus.events import Streamed
from tinsmith.bus.protocol.envelope import SAMPLE_LANE
from tinsmith.bus.protocol.errors import Gap

router = APIRouter(prefix="/api/v1")


@router.get("/sessions/{session}/trace_export")
async def trace_export(request: Request, session: str) -> Response:
    """Where it can be fetched, without a key, for an hour."""
    await own_session(request, session)
    expires, secret = expiry(), await gateway_of(request).store.secret()
    if await _timeline(gateway_of(request), session) is None:
        return json_response({"status": "failed", "error": "the bus keeps no events of this session, or has none yet"})
    sign = signature(secret, f"trace/{session}", expires)
    url = f"{request.base_url}api/v1/session_traces/{session}?expires={expires}&signature={sign}"
    return json_response({"status": "ready", "url": url})


@router.get("/session_traces/{session}")
async def session_trace(request: Request, session: str, expires: int = 0, signature: str = "") -> Response:
    """The timeline as it is now, for whoever has the address."""
    gateway = gateway_of(request)
    if not is_signed(await gateway.store.secret(), f"trace/{session}", expires, signature):
        raise HttpError(403, "this address is not valid, or no longer; ask for a new one")
    trace = await _timeline(gateway, session)
    if trace is None:
        raise HttpError(404, "the bus no longer keeps events of this session")
    return Response(json.dumps(trace, separators=(",", ":")), media_type="application/json")


async def _timeline(gateway: Gateway, session: str) -> dict[str, object] | None:
    """Made of every event up to now."""
    models = [*await gateway.store.models(session), SAMPLE_LANE]
    keys = gateway.bus.session.keys
    newest = await gateway.bus.session.call(*(("XREVRANGE", keys.events(it), "+", "-", "COUNT", 1) for it in models))
    # A stream without entries has no last one to wait for.
    last = {model: _place(entry[0][0].decode()) for model, entry in zip(models, newest, strict=True) if entry}
    items: list[Streamed | Gap] = []
    if last:
        async for item in gateway.bus.events(sorted(last), "0"):
            items.append(item)
            if isinstance(item, Streamed) and _place(item.id) >= last.get(item.model, (0, 0)):
                last.pop(item.model, None)
                if not last:
                    break
    return timeline(session, items)


def _place(text: str) -> tuple[int, int]:
    birth, _, n = text.partition("-")
    return int(birth), int(n)

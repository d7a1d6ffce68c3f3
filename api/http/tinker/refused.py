"""Tinker API: what a service that one runs oneself can't do truthfully. Each says so, and what to do instead.

A 400 is raised by clients at once; a 5xx, a 402 or a 409 they would repeat for minutes.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from tinsmith.api.http.tinker.startup import gateway_of
from tinsmith.bus.protocol.errors import InvalidInput

router = APIRouter(prefix="/api/v1")


@router.get("/audit")
async def audit(request: Request) -> Response:
    """Nobody's acts are recorded but as commands."""
    raise _not_here(request, "keeps no audit log", "Follow the events of its models: `tinsmith watch --since 0`.")


@router.get("/billing/usage/events")
async def usage(request: Request) -> Response:
    """There are no prices."""
    raise _not_here(request, "bills nothing", "Count tokens by the metrics of each result, or by GET /metrics.")


@router.get("/billing/usage/checkpoints/current")
async def storage(request: Request) -> Response:
    """There are no prices."""
    raise _not_here(request, "bills nothing", "Add up size_bytes of GET /api/v1/checkpoints.")


@router.get("/auth/apikey/me")
@router.delete("/auth/apikey/me")
async def own_key(request: Request) -> Response:
    """Keys have no names, users or organizations, and are withdrawn where they were set."""
    raise _not_here(
        request,
        "has no accounts to log in to or out of",
        "Set TINKER_API_KEY; its operator lists the keys that are let in with TINSMITH_API_KEYS.",
    )


@router.post("/create_custom_loss")
async def create_custom_loss(request: Request) -> Response:
    """Programs of tenants are not run here; the client's own flag for it is off, so it computes such a loss itself."""
    raise _not_here(
        request,
        "runs no losses that a client sent",
        "Use forward_backward_custom, which computes it in the client, or start the service with --losses MODULE.",
    )


def _not_here(request: Request, what: str, remedy: str) -> InvalidInput:
    gateway_of(request).owner(request)
    return InvalidInput(f"this service {what}", remedy=remedy)

"""Bodies in and out: JSON that keeps NaN, and what a client sent as JSON."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

PROTOBUF = "application/x-protobuf"


class HttpError(Exception):
    """An answer other than 2xx, with its text."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


def json_response(body: Any, status: int = 200) -> Response:
    """JSON; numbers that are not finite stand as NaN, Infinity and -Infinity, never as null or 0."""
    return Response(json.dumps(body, separators=(",", ":")), status, media_type="application/json")


def proto_response(body: bytes) -> Response:
    """A serialized message."""
    return Response(body, media_type=PROTOBUF)


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object that was sent; {} for an empty body. Raises HttpError 400 for anything else."""
    body = await request.body()
    if not body:
        return {}
    try:
        found = json.loads(body)
    except ValueError as error:
        raise HttpError(400, f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise HttpError(400, "the body is not a JSON object")
    return found

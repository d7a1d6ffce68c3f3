"""From typed errors to HTTP: a status for a request that is answered at once, a category for a future that failed."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.api.http.responses import HttpError, json_response
from tinsmith.bus.protocol.errors import (
    BusError,
    Busy,
    DiskFull,
    InvalidInput,
    NonFinite,
    TinsmithError,
    UnknownCommand,
    UnknownModel,
    UnknownVersion,
)


def status_of(error: TinsmithError) -> int:
    """The HTTP status of a request that failed at once; 429 and 503 are worth trying again."""
    match error:
        case UnknownModel() | UnknownVersion():
            return 404
        case UnknownCommand():
            return 410
        case InvalidInput():
            return 400
        case Busy():
            return 429
        case BusError():
            return 503
        case DiskFull():
            return 507
    return 500


def failed_future(error: TinsmithError) -> dict[str, Any]:
    """The result of a future that failed; `user` when the request itself was wrong."""
    category = "user" if isinstance(error, InvalidInput | NonFinite) else "server"
    return {"error": str(error), "category": category}


async def answer_http_error(request: Request, error: Exception) -> Response:
    """The response for an HttpError."""
    assert isinstance(error, HttpError)
    return json_response({"detail": error.detail}, error.status)


async def answer_typed_error(request: Request, error: Exception) -> Response:
    """The response for a TinsmithError that no endpoint made into a failed future."""
    assert isinstance(error, TinsmithError)
    return json_response({"detail": str(error), "error": error.to_wire()}, status_of(error))

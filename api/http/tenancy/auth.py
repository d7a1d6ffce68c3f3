"""Who is asking: the owner behind an API key. Tenants see only what they own."""

from __future__ import annotations

import hashlib
import hmac

from starlette.requests import Request

from tinsmith.api.http.responses import HttpError

ANONYMOUS = "anonymous"


def owner_of(request: Request, keys: tuple[str, ...]) -> str:
    """A short name derived from the key in X-API-Key or Authorization; the key itself is kept nowhere.

    Raises HttpError 401 for a missing or unknown key, when `keys` says which ones are let in.
    """
    header = request.headers.get("authorization", "")
    key = request.headers.get("x-api-key") or header.removeprefix("Bearer ").strip()
    if keys and not any(hmac.compare_digest(key.encode(), known.encode()) for known in keys):
        raise HttpError(401, "this API key is not known here")
    return hashlib.blake2b(key.encode(), digest_size=8).hexdigest() if key else ANONYMOUS

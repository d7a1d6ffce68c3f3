"""Addresses that are good for an hour: whoever has one may fetch that one thing without a key."""

from __future__ import annotations

import hashlib
import hmac
import time

URL_SECONDS = 3600


def expiry() -> int:
    """Unix seconds until which an address that is made now is good."""
    return int(time.time()) + URL_SECONDS


def signature(secret: bytes, thing: str, expires: int) -> str:
    """What only the holder of the secret can write under an address."""
    return hmac.new(secret, f"{thing}?{expires}".encode(), hashlib.sha256).hexdigest()


def is_signed(secret: bytes, thing: str, expires: int, given: str) -> bool:
    """Whether an address is ours, for this thing, and still good."""
    right = hmac.compare_digest(given.encode(), signature(secret, thing, expires).encode())
    return right and expires >= time.time()

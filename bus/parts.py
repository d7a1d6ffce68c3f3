"""Parts of results that are not whole yet: pieces of samples, sent to the inbox of whoever submitted the command.

A part is a hint of the result to come, which arrives whole and does not depend on it. Parts may come twice (after the
lane was taken over) or not at all (to a second submitter of the same command), so each says where it belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tinsmith.bus.codec import decode, encode
from tinsmith.bus.errors import ProtocolError


@dataclass(frozen=True)
class Part:
    """Tokens `at` and on of one sample of a request."""

    index: int
    """Which of the samples."""
    at: int
    """How many of its tokens came before."""
    tokens: list[int]
    logprobs: list[float]
    text: str
    """What can be shown now of its text: what may yet become a stop string, or half a character, comes later."""
    stop_reason: str | None = None
    """Of the last part of a sample."""
    topk: list[list[list[float]]] | None = None
    """For each token the likeliest ones in its place, [token, log-prob], best first; None unless asked for."""


def pack_parts(parts: Sequence[Part]) -> bytes:
    """The frame of parts that travel together, in order."""
    return encode([asdict(part) for part in parts])


def unpack_parts(frame: bytes) -> list[Part]:
    """The parts of a frame. Raises ProtocolError."""
    tree: Any = decode(frame)
    try:
        return [Part(**fields) for fields in tree]
    except TypeError as error:
        raise ProtocolError(f"not parts of a result: {error}") from None

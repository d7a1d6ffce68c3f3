"""Parts of results that are not whole yet: pieces of samples, sent to the inbox of whoever submitted the command.

A part is a hint of the result to come, which arrives whole and does not depend on it. Parts may come twice (after the
lane was taken over) or not at all (to a second submitter of the same command), so each says where it belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tinsmith.bus.protocol.codec import decode, encode, unpack_ragged
from tinsmith.bus.protocol.envelope import Event
from tinsmith.bus.protocol.errors import CommandFailed, ProtocolError


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


@dataclass
class Told:
    """What a reader was told of one sample so far: each token once, whatever comes twice or not at all."""

    index: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    ended: bool = False

    def take(self, part: Part) -> Part | None:
        """The part, noted as told; None when it was told before, or parts before it are missing: then `rest` has it."""
        if part.at != len(self.tokens):
            return None
        self.tokens += part.tokens
        self.text += part.text
        self.ended = part.stop_reason is not None
        return part

    def rest(self, whole: Part) -> Part | None:
        """What of the whole sample was not told yet, noted as told. Raises CommandFailed when it differs from that."""
        told = len(self.tokens)
        if whole.tokens[:told] != self.tokens or not whole.text.startswith(self.text):
            raise CommandFailed("the sampler began again and went on otherwise", remedy="Ask again, with a seed.")
        if self.ended:
            return None
        topk = whole.topk[told:] if whole.topk is not None else None
        tokens, logprobs, text = whole.tokens[told:], whole.logprobs[told:], whole.text[len(self.text) :]
        return self.take(Part(whole.index, told, tokens, logprobs, text, whole.stop_reason, topk))


def wholes(event: Event, body: bytes) -> list[Part]:
    """Each sample of a result as one part."""
    tree: dict[str, Any] = decode(body)
    count = len(event.result["texts"])
    none: list[Any] = [None] * count
    columns = [unpack_ragged(tree[name]) if name in tree else none for name in ("topk_tokens", "topk_logprobs")]
    rows = zip(unpack_ragged(tree["tokens"]), unpack_ragged(tree["logprobs"]), *columns, strict=True)
    parts = []
    for index, (tokens, logprobs, likeliest, scores) in enumerate(rows):
        assert tokens is not None
        assert logprobs is not None
        topk = None if likeliest is None or scores is None else np.stack([likeliest, scores], -1).tolist()
        text, reason = event.result["texts"][index], event.result["stop_reasons"][index]
        parts.append(Part(index, 0, tokens.tolist(), logprobs.tolist(), text, reason, topk))
    return parts

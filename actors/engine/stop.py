"""When a sample ends: at a stop token, at a stop string (also one that several tokens make up), or at its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

StopReason = Literal["stop", "length"]

_CONTEXT = 6
"""Prompt tokens decoded before the continuation, so that a leading space is kept as the tokenizer would write it."""


class Detokenizer:
    """Text of a growing token list, at a cost per token that does not grow with the list.

    Only the tokens since the last complete piece are decoded again; a piece that ends inside a UTF-8 character stays
    provisional until the character is complete.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._tokens = [int(token) for token in prompt[-_CONTEXT:]]
        self._start, self._read = 0, len(self._tokens)
        self.text = ""

    def feed(self, tokens: Sequence[int]) -> str:
        """Take more tokens; returns all text so far, with U+FFFD in place of an unfinished last character."""
        self._tokens.extend(tokens)
        before = self._decode(self._tokens[self._start : self._read])
        piece = self._decode(self._tokens[self._start :])[len(before) :]
        if piece.endswith("�"):
            return self.text + piece
        self.text += piece
        self._start, self._read = self._read, len(self._tokens)
        return self.text

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(
            tokens, skip_special_tokens=self._skip_special, clean_up_tokenization_spaces=False
        )
        return str(text)


class StopRule:
    """Decides after every token of one sample whether it is the last."""

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        *,
        stop_tokens: frozenset[int],
        stop_strings: tuple[str, ...],
        max_tokens: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt[-_CONTEXT:]
        self._stop_tokens = stop_tokens
        self._stop_strings = stop_strings
        self._max_tokens = max_tokens
        self._count = 0
        self._at_token = False
        self._matched = False
        self._longest = max((len(s) for s in stop_strings), default=0)
        # Special tokens are part of the text here: a stop string may be one.
        self._detokenizer = Detokenizer(tokenizer, self._prompt, skip_special=False) if stop_strings else None

    def after(self, token: int) -> StopReason | None:
        """The reason to end after this token, or None to go on; a stop takes precedence over the length."""
        self._count += 1
        if token in self._stop_tokens:
            self._at_token = True
            return "stop"
        if self._detokenizer is not None:
            known = len(self._detokenizer.text)
            text = self._detokenizer.feed([token])
            tail = text[max(0, known - self._longest + 1) :]
            if any(stop in tail for stop in self._stop_strings):
                self._matched = True
                return "stop"
        return "length" if self._count >= self._max_tokens else None

    def text(self, tokens: Sequence[int]) -> str:
        """The continuation as text, without special tokens, ending before the stop token or stop string."""
        if self._tokenizer is None:
            return ""
        body = tokens[:-1] if self._at_token else tokens
        text = Detokenizer(self._tokenizer, self._prompt, skip_special=True).feed(body)
        if self._matched:
            text = text[: min([at for at in (text.find(s) for s in self._stop_strings) if at >= 0], default=len(text))]
        return text

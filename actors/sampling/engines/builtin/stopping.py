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


class VisibleText:
    """The text of a continuation as it grows, as far as it can be shown: without an unfinished character, and without
    an end that may yet become a stop string."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop_strings: tuple[str, ...]) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt, skip_special=True)
        self._stop_strings = stop_strings
        self._shown = 0

    def feed(self, token: int) -> str:
        """Take one more token; returns the text that can be shown since the last time."""
        self._detokenizer.feed([token])
        text = self._detokenizer.text
        fresh = text[self._shown : len(text) - self._held(text)]
        self._shown += len(fresh)
        return fresh

    def rest(self, final: str) -> str:
        """What of the final text was not shown yet."""
        return final[self._shown :]

    def _held(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) for stop in self._stop_strings), default=1) - 1
        for size in range(min(longest, len(text) - self._shown), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop_strings):
                return size
        return 0


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
        detokenizer = Detokenizer(self._tokenizer, self._prompt, skip_special=True)
        if not self._matched:
            return detokenizer.feed(body)
        # The last token completed the match, which so begins no earlier than this; special tokens, which are looked at
        # for the match and not shown, may have made another one seem complete before.
        detokenizer.feed(body[:-1])
        start = max(0, len(detokenizer.text) - self._longest + 1)
        text = detokenizer.feed(body[-1:])
        return text[: min([at for s in self._stop_strings if (at := text.find(s, start)) >= 0], default=len(text))]

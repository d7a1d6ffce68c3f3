"""Choices of an OpenAI completion in the making: what was told of each, and how it looks in either dialect.

Log-probs are those of the distribution that the token came from, at the temperature used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from tinsmith.api.http.openai.text_codec import TOKEN_ID
from tinsmith.bus.protocol.parts import Part

Shape = Literal["text_completion", "chat.completion"]
Name = Callable[[int], str]
"""The text of one token id, special tokens included."""


def joined(parts: Sequence[Part]) -> Part:
    """Parts of one sample that follow each other, as one."""
    topks = [part.topk for part in parts]
    return Part(
        parts[0].index,
        parts[0].at,
        [token for part in parts for token in part.tokens],
        [logprob for part in parts for logprob in part.logprobs],
        "".join(part.text for part in parts),
        parts[-1].stop_reason,
        None if any(topk is None for topk in topks) else [row for topk in topks for row in topk or ()],
    )


def by_choice(parts: Iterable[Part]) -> list[Part]:
    """Parts that came together, one for each choice."""
    found: dict[int, list[Part]] = {}
    for part in parts:
        found.setdefault(part.index, []).append(part)
    return [joined(of_one) for of_one in found.values()]


def as_json(part: Part, shape: Shape, index: int, name: Name | None, *, delta: bool) -> dict[str, Any]:
    """A choice, or with `delta` a piece of one. name: given when log-probs are wanted."""
    choice: dict[str, Any] = {"index": index, "finish_reason": part.stop_reason, "logprobs": None}
    if shape == "text_completion":
        choice["text"] = part.text
    elif delta:
        choice["delta"] = ({"role": "assistant"} if part.at == 0 else {}) | {"content": part.text}
    else:
        choice["message"] = {"role": "assistant", "content": part.text, "refusal": None}
    if name is not None:
        choice["logprobs"] = (_completion if shape == "text_completion" else _chat)(part, name)
    return choice


def _completion(part: Part, name: Name) -> dict[str, Any]:
    tops = part.topk or [[] for _ in part.tokens]
    return {
        "tokens": [name(token) for token in part.tokens],
        "token_logprobs": part.logprobs,
        "top_logprobs": [{name(int(token)): logprob for token, logprob in row} for row in tops],
    }


def _chat(part: Part, name: Name) -> dict[str, Any]:
    tops = part.topk or [[] for _ in part.tokens]
    content = [
        {**_token(token, logprob, name), "top_logprobs": [_token(int(t), p, name) for t, p in row]}
        for token, logprob, row in zip(part.tokens, part.logprobs, tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def _token(token: int, logprob: float, name: Name) -> dict[str, Any]:
    text = name(token)
    return {"token": text, "logprob": logprob, "bytes": None if text == f"{TOKEN_ID}{token}" else list(text.encode())}

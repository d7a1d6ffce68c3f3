"""OpenAI's completions and chat completions over the samplers; `model` is the base's name or a sampler_weights path.

What can't be done as asked is refused: nothing here is ignored but the fields that OpenAI calls metadata.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from tinsmith.api.http.catalog import saved
from tinsmith.api.http.door import Door
from tinsmith.api.http.fields import field, maybe, optional
from tinsmith.api.http.names import parse_path
from tinsmith.api.http.responses import HttpError, json_response, read_object
from tinsmith.api.http.routes.sampling import stop_args
from tinsmith.api.http.routes.session import door_of
from tinsmith.api.http.tokenizer import TextCodec, load_codec
from tinsmith.bus.codec import decode, encode, unpack_ragged
from tinsmith.bus.commands import parse_args
from tinsmith.bus.envelope import SAMPLE_LANE, Command, Event, Kind, new_id
from tinsmith.bus.errors import DeadlineExceeded, InvalidInput, TinsmithError

router = APIRouter()

SECONDS = 600.0
"""How long a completion may take."""
DEFAULT_TOKENS = {"text_completion": 16, "chat.completion": None}
"""max_tokens where the client gives none, as OpenAI has it; None: what the context has room for."""
_SHARED = {
    "model",
    "n",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "stream",
    "logprobs",
    "user",
    "metadata",
}
ALLOWED = {
    "text_completion": _SHARED | {"prompt", "echo"},
    "chat.completion": _SHARED | {"messages", "max_completion_tokens"},
}
NEUTRAL = {"presence_penalty": 0, "frequency_penalty": 0, "stream": False, "echo": False, "best_of": 1, "suffix": None}
"""Fields that may be sent with these values alone."""


@router.get("/v1/models")
@router.get("/oai/api/v1/models")
async def models(request: Request) -> Response:
    """The base model's names, and the caller's published versions."""
    door, owner = door_of(request), door_of(request).owner(request)
    names = list(door.settings.names)
    for model in await door.store.models():
        record = await door.store.model(model)
        if record is not None and record.owner == owner:
            found = await asyncio.to_thread(saved, door.settings, model, {})
            names += [str(one.path) for one in found if one.path.kind == "sampler_weights"]
    return json_response(
        {"object": "list", "data": [{"id": n, "object": "model", "owned_by": "tinsmith"} for n in names]}
    )


@router.post("/v1/completions")
@router.post("/oai/api/v1/completions")
async def completions(request: Request) -> Response:
    """Continue one prompt, given as text or token ids."""
    door, body = door_of(request), await read_object(request)
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        tokens = (await _codec(request)).encode(prompt)
    elif isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        tokens = prompt
    else:
        raise InvalidInput("the prompt is not one text or one list of token ids", field="prompt")
    return await _complete(door, request, body, tokens, "text_completion")


@router.post("/v1/chat/completions")
@router.post("/oai/api/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Answer a conversation through the model's own chat template."""
    door, body = door_of(request), await read_object(request)
    tokens = (await _codec(request)).chat(field(body, "messages", list[dict[str, Any]]))
    return await _complete(door, request, body, tokens, "chat.completion")


async def _complete(
    door: Door, request: Request, body: Mapping[str, Any], prompt: Sequence[int], shape: str
) -> Response:
    _check(body, shape)
    version = await _version(door, request, field(body, "model", str))
    most = maybe(body, "max_completion_tokens", int) or maybe(body, "max_tokens", int) or DEFAULT_TOKENS[shape]
    args: dict[str, Any] = {
        "version": version,
        "n": optional(body, "n", int, 1),
        "max_tokens": most or max(1, await door.context() - len(prompt)),
        "temperature": optional(body, "temperature", float, 1.0),
        "top_p": optional(body, "top_p", float, 1.0),
        "top_k": optional(body, "top_k", int, -1),
        "seed": maybe(body, "seed", int),
        **stop_args(body.get("stop")),
    }
    parse_args(Kind.SAMPLE, args)
    command = Command(id=new_id(), model=SAMPLE_LANE, kind=Kind.SAMPLE, seq=-1, args=args)
    try:
        event, frame = await door.inbox.call(
            command, encode({"prompt": np.asarray(prompt, np.int32)}), deadline=SECONDS
        )
    except DeadlineExceeded:
        raise HttpError(504, f"no answer within {SECONDS:g} s") from None
    if event.error is not None:
        raise TinsmithError.from_wire(event.error)
    return json_response(_answer(event, dict(decode(frame)), body, len(prompt), shape))


def _answer(
    event: Event, tree: Mapping[str, Any], body: Mapping[str, Any], prompt_tokens: int, shape: str
) -> dict[str, Any]:
    rows = zip(
        unpack_ragged(tree["tokens"]),
        unpack_ragged(tree["logprobs"]),
        event.result["texts"],
        event.result["stop_reasons"],
        strict=True,
    )
    choices, sampled = [], 0
    for index, (tokens, logprobs, text, reason) in enumerate(rows):
        assert tokens is not None
        assert logprobs is not None
        sampled += len(tokens)
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        if shape == "text_completion":
            choice["text"] = text
        else:
            choice["message"] = {"role": "assistant", "content": text}
        if body.get("logprobs"):
            choice["logprobs"] = {"token_ids": tokens.tolist(), "token_logprobs": logprobs.tolist()}
        choices.append(choice)
    return {
        "id": f"cmpl-{event.id}",
        "object": shape,
        "created": math.floor(time.time()),
        "model": body["model"],
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": prompt_tokens + sampled,
        },
    }


def _check(body: Mapping[str, Any], shape: str) -> None:
    """Raises InvalidInput for a field that would have to be ignored."""
    for name, value in body.items():
        if name in NEUTRAL and value not in (NEUTRAL[name], None):
            raise InvalidInput(f"{value!r} can't be done here", remedy="Leave it out.", field=name)
        if name not in ALLOWED[shape] and name not in NEUTRAL:
            raise InvalidInput(
                "no such field here", remedy=f"Known are: {', '.join(sorted(ALLOWED[shape]))}.", field=name
            )
    if type(body.get("logprobs")) is int and body["logprobs"] > 1:
        raise InvalidInput("only the sampled token's own log-prob is told", remedy="Send 1.", field="logprobs")


async def _version(door: Door, request: Request, model: str) -> str:
    """`base`, or the version of a path that is the caller's or public."""
    if model in door.settings.names:
        return "base"
    path = parse_path(model, "sampler_weights")
    await door.readable(request, path)
    return path.place


async def _codec(request: Request) -> TextCodec:
    """The model's tokenizer, read once in each replica."""
    state = request.app.state
    if getattr(state, "codec", None) is None:
        state.codec = await asyncio.to_thread(load_codec, state.door.settings.model_path)
    codec: TextCodec = state.codec
    return codec

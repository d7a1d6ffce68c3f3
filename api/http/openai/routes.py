"""OpenAI's completions and chat completions over the samplers; `model` is the base's name or a sampler_weights path.

What can't be done as asked is refused: nothing here is ignored but the fields that OpenAI calls metadata.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse

from tinsmith.api.http.fields import field, maybe, optional, token_array
from tinsmith.api.http.gateway import Gateway
from tinsmith.api.http.openai.choices import Name, Shape, as_json, by_choice
from tinsmith.api.http.openai.text_codec import TextCodec, load_codec
from tinsmith.api.http.responses import HttpError, json_response, read_object
from tinsmith.api.http.retention.catalog import saved
from tinsmith.api.http.tenancy.names import owned_id, parse_path
from tinsmith.api.http.tinker.samples import stop_args
from tinsmith.api.http.tinker.startup import gateway_of
from tinsmith.bus.inbox import Completion
from tinsmith.bus.protocol.codec import encode
from tinsmith.bus.protocol.commands import parse_args
from tinsmith.bus.protocol.envelope import SAMPLE_LANE, Command, Kind
from tinsmith.bus.protocol.errors import DeadlineExceeded, InvalidInput, TinsmithError
from tinsmith.bus.protocol.parts import Part, Told, wholes

router = APIRouter()

SECONDS = 600.0
"""How long a completion may take."""
DEFAULT_TOKENS: dict[Shape, int | None] = {"text_completion": 16, "chat.completion": None}
"""max_tokens where the client gives none, as OpenAI has it; None: what the context has room for."""
MOST_PROMPTS = 128
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
    "stream_options",
    "logprobs",
    "user",
    "metadata",
}
ALLOWED: dict[Shape, set[str]] = {
    "text_completion": _SHARED | {"prompt"},
    "chat.completion": _SHARED | {"messages", "max_completion_tokens", "top_logprobs"},
}
NEUTRAL = {"presence_penalty": 0, "frequency_penalty": 0, "echo": False, "best_of": 1, "suffix": None}
"""Fields that may be sent with these values alone."""


Arrived = tuple[int, list[Part] | Completion]
"""Number of the prompt, and parts of its samples, or all of them."""


@dataclass(frozen=True)
class Asked:
    """One request: its prompts in token ids, each a command of its own, and how the answer is to look."""

    shape: Shape
    model: str
    prompts: Sequence[Sequence[int]]
    commands: Sequence[Command]
    n: int
    name: Name | None
    usage: bool
    """Whether a stream ends with the token counts."""


@router.get("/v1/models")
@router.get("/oai/api/v1/models")
async def models(request: Request) -> Response:
    """The base model's names, and the caller's published versions."""
    gateway, owner = gateway_of(request), gateway_of(request).owner(request)
    names = list(gateway.settings.names)
    for model in await gateway.store.models():
        record = await gateway.store.model(model)
        if record is not None and record.owner == owner:
            found = await asyncio.to_thread(saved, gateway.settings, model, {})
            names += [str(one.path) for one in found if one.path.kind == "sampler_weights"]
    return json_response(
        {"object": "list", "data": [{"id": n, "object": "model", "owned_by": "tinsmith"} for n in names]}
    )


@router.post("/v1/completions")
@router.post("/oai/api/v1/completions")
async def completions(request: Request) -> Response:
    """Continue one prompt or several, each given as text or token ids."""
    body = await read_object(request)
    prompts = body.get("prompt")
    if isinstance(prompts, str) or (isinstance(prompts, list) and all(type(token) is int for token in prompts)):
        prompts = [prompts]
    if not isinstance(prompts, list) or not 0 < len(prompts) <= MOST_PROMPTS:
        raise InvalidInput(
            f"not a text, a list of token ids, or a list of 1 to {MOST_PROMPTS} of either", field="prompt"
        )
    tokens = []
    for prompt in prompts:
        if isinstance(prompt, str):
            tokens.append((await _codec(request)).encode(prompt))
        elif isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            tokens.append(prompt)
        else:
            raise InvalidInput("a prompt is neither a text nor a list of token ids", field="prompt")
    return await _complete(request, body, tokens, "text_completion")


@router.post("/v1/chat/completions")
@router.post("/oai/api/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Answer a conversation through the model's own chat template."""
    body = await read_object(request)
    tokens = (await _codec(request)).chat(field(body, "messages", list[dict[str, Any]]))
    return await _complete(request, body, [tokens], "chat.completion")


async def _complete(
    request: Request, body: Mapping[str, Any], prompts: Sequence[Sequence[int]], shape: Shape
) -> Response:
    gateway = gateway_of(request)
    asked = await _read(gateway, request, body, prompts, shape)
    results = _results(gateway, asked)
    if optional(body, "stream", bool, False):
        # What fails at once is answered with its own status.
        first = await anext(results)
        return StreamingResponse(_stream(asked, first, results), media_type="text/event-stream")
    parts: list[list[Part]] = [[] for _ in prompts]
    async for at, item in results:
        if isinstance(item, tuple):
            parts[at] = wholes(*item)
    choices = [
        as_json(part, shape, at * asked.n + part.index, asked.name, delta=False)
        for at, of_one in enumerate(parts)
        for part in of_one
    ]
    sampled = sum(len(part.tokens) for of_one in parts for part in of_one)
    return json_response({**_head(asked, shape), "choices": choices, "usage": _usage(asked, sampled)})


async def _stream(asked: Asked, first: Arrived, others: AsyncIterator[Arrived]) -> AsyncIterator[bytes]:
    """Server-sent events, as OpenAI has them; an error ends the stream and stands in it."""
    head = _head(asked, "chat.completion.chunk" if asked.shape == "chat.completion" else asked.shape)
    choices = [Told(index) for index in range(len(asked.prompts) * asked.n)]
    try:
        async for at, item in _chain(first, others):
            of_prompt = choices[at * asked.n :]
            if isinstance(item, tuple):
                fresh = [rest for part in wholes(*item) if (rest := of_prompt[part.index].rest(part))]
            else:
                fresh = [told for part in by_choice(item) if (told := of_prompt[part.index].take(part))]
            for part in fresh:
                if part.text or asked.name is not None or part.stop_reason is not None or part.at == 0:
                    piece = as_json(part, asked.shape, of_prompt[part.index].index, asked.name, delta=True)
                    yield _event({**head, "choices": [piece]})
        if asked.usage:
            counted = _usage(asked, sum(len(choice.tokens) for choice in choices))
            yield _event({**head, "choices": [], "usage": counted})
    except TinsmithError as error:
        yield _event({"error": {**error.to_wire(), "message": str(error)}})
    except HttpError as error:
        yield _event({"error": {"message": error.detail, "code": error.status}})
    yield b"data: [DONE]\n\n"


async def _chain(first: Arrived, others: AsyncIterator[Arrived]) -> AsyncIterator[Arrived]:
    yield first
    async for item in others:
        yield item


async def _results(gateway: Gateway, asked: Asked) -> AsyncIterator[Arrived]:
    """Parts and results by prompt, as they come. Raises the first failure; whatever is left then is stopped."""
    arrived: asyncio.Queue[tuple[int, list[Part] | Completion | BaseException]] = asyncio.Queue()

    async def follow(at: int, command: Command) -> None:
        try:
            body = encode({"prompt": token_array(asked.prompts[at])})
            async for item in gateway.inbox.stream(command, body):
                arrived.put_nowait((at, item))
        except Exception as error:
            arrived.put_nowait((at, error))

    following = [asyncio.create_task(follow(at, command)) for at, command in enumerate(asked.commands)]
    left = set(range(len(asked.commands)))
    deadline = time.monotonic() + SECONDS
    try:
        while left:
            # Not around the whole: the answer is written by another task than the one that began here.
            at, item = await asyncio.wait_for(arrived.get(), deadline - time.monotonic())
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, tuple):
                left.discard(at)
                if item[0].error is not None:
                    raise TinsmithError.from_wire(item[0].error)
            yield at, item
    except (TimeoutError, DeadlineExceeded):
        raise HttpError(504, f"no answer within {SECONDS:g} s") from None
    finally:
        for task in following:
            task.cancel()
        # Whoever asked is gone or has been told of a failure: what still samples for them frees its place.
        for at in left:
            gateway.cancel_soon(asked.commands[at].id)


async def _read(
    gateway: Gateway, request: Request, body: Mapping[str, Any], prompts: Sequence[Sequence[int]], shape: Shape
) -> Asked:
    """Raises InvalidInput, UnknownVersion."""
    _check(body, shape)
    model = field(body, "model", str)
    wanted, likeliest = _logprobs(body, shape)
    asked = (maybe(body, name, int) for name in ("max_completion_tokens", "max_tokens"))
    most = next((count for count in asked if count is not None), DEFAULT_TOKENS[shape])
    shared: dict[str, Any] = {
        "version": await _version(gateway, request, model),
        "n": optional(body, "n", int, 1),
        "temperature": optional(body, "temperature", float, 1.0),
        "top_p": optional(body, "top_p", float, 1.0),
        "top_k": optional(body, "top_k", int, -1),
        "topk": likeliest,
        "seed": maybe(body, "seed", int),
        "stream": optional(body, "stream", bool, False),
        **stop_args(body.get("stop")),
    }
    commands = []
    owner = gateway.owner(request)
    for prompt in prompts:
        args = {**shared, "max_tokens": max(1, await gateway.context() - len(prompt)) if most is None else most}
        parse_args(Kind.SAMPLE, args)
        commands.append(Command(id=owned_id(owner), model=SAMPLE_LANE, kind=Kind.SAMPLE, seq=-1, args=args))
    options = optional(body, "stream_options", dict[str, Any], {})
    for unknown in set(options) - {"include_usage"}:
        raise InvalidInput(f"no such option {unknown!r}", remedy="Known is: include_usage.", field="stream_options")
    name = (await _codec(request)).name if wanted else None
    return Asked(shape, model, prompts, commands, shared["n"], name, optional(options, "include_usage", bool, False))


def _logprobs(body: Mapping[str, Any], shape: Shape) -> tuple[bool, int]:
    """Whether log-probs are wanted, and of how many of the likeliest tokens beside the sampled one."""
    if shape == "text_completion":
        count = maybe(body, "logprobs", int)
        return count is not None, count or 0
    wanted, top = optional(body, "logprobs", bool, False), optional(body, "top_logprobs", int, 0)
    if top and not wanted:
        raise InvalidInput("top_logprobs without logprobs", remedy="Send logprobs: true.", field="top_logprobs")
    return wanted, top


def _head(asked: Asked, what: str) -> dict[str, Any]:
    prefix = "chatcmpl" if asked.shape == "chat.completion" else "cmpl"
    return {
        "id": f"{prefix}-{asked.commands[0].id}",
        "object": what,
        "created": math.floor(time.time()),
        "model": asked.model,
    }


def _usage(asked: Asked, sampled: int) -> dict[str, int]:
    prompts = sum(len(prompt) for prompt in asked.prompts)
    return {"prompt_tokens": prompts, "completion_tokens": sampled, "total_tokens": prompts + sampled}


def _event(data: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def _check(body: Mapping[str, Any], shape: Shape) -> None:
    """Raises InvalidInput for a field that would have to be ignored."""
    for name, value in body.items():
        if name in NEUTRAL and value not in (NEUTRAL[name], None):
            raise InvalidInput(f"{value!r} can't be done here", remedy="Leave it out.", field=name)
        if name not in ALLOWED[shape] and name not in NEUTRAL and value is not None:
            raise InvalidInput(
                "no such field here", remedy=f"Known are: {', '.join(sorted(ALLOWED[shape]))}.", field=name
            )


async def _version(gateway: Gateway, request: Request, model: str) -> str:
    """`base`, or the version of a path that is the caller's or public."""
    if model in gateway.settings.names:
        return "base"
    path = parse_path(model, "sampler_weights")
    await gateway.readable(request, path)
    return path.place


async def _codec(request: Request) -> TextCodec:
    """The model's tokenizer, read once in each replica."""
    state = request.app.state
    if getattr(state, "codec", None) is None:
        state.codec = await asyncio.to_thread(load_codec, state.gateway.settings.model_path)
    codec: TextCodec = state.codec
    return codec

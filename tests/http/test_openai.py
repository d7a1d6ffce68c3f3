"""OpenAI's completions and chat completions over the samplers."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from gateway_app import Running, running
from serving import Service

from tinsmith.api import connect
from tinsmith.api.http.settings import HttpSettings
from tinsmith.bus.events import Streamed


@pytest.fixture(scope="module")
def talker(app: Running) -> httpx.Client:
    """A plain client."""
    return app.http()


def test_a_text_is_continued_as_often_as_asked(talker: httpx.Client) -> None:
    asked = {"model": "tiny", "prompt": "hello world", "n": 2, "max_tokens": 3, "seed": 1, "logprobs": 1}
    answer = talker.post("/v1/completions", json=asked).json()
    assert answer["usage"]["prompt_tokens"] == len("hello world")
    assert [len(choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]] == [3, 3]
    assert all(choice["finish_reason"] == "length" for choice in answer["choices"])
    assert talker.post("/oai/api/v1/completions", json=asked).json()["choices"] == answer["choices"]


def test_a_conversation_goes_through_the_chat_template(talker: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hello"}]
    asked = {"model": "tiny", "messages": messages, "max_tokens": 2}
    answer = talker.post("/v1/chat/completions", json=asked).json()
    assert answer["usage"]["prompt_tokens"] == len("user: hello\nassistant: ")
    assert answer["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize(
    "change", [{"stream": "yes"}, {"logit_bias": {}}, {"model": "gpt"}, {"temperature": "hot"}, {"presence_penalty": 1}]
)
def test_what_can_not_be_done_as_asked_is_refused(talker: httpx.Client, change: dict[str, object]) -> None:
    answer = talker.post("/v1/completions", json={"model": "tiny", "prompt": "hello", **change})
    assert answer.status_code == 400
    assert next(iter(change)) in answer.json()["detail"] or "path" in answer.json()["detail"]


def test_a_model_without_a_tokenizer_takes_token_ids_alone(settings: HttpSettings, tmp_path: Path) -> None:
    with running(settings.model_copy(update={"model_path": str(tmp_path)})) as app:
        _ids_alone(app.http())


def _ids_alone(http: httpx.Client) -> None:
    ids = http.post("/v1/completions", json={"model": "tiny", "prompt": [1, 2], "max_tokens": 2})
    assert ids.json()["usage"]["total_tokens"] >= 3
    text = http.post("/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 2})
    assert text.status_code == 400
    assert "tiny" in [model["id"] for model in http.get("/v1/models").json()["data"]]


@pytest.fixture(scope="module")
def openai_client(talker: httpx.Client) -> Iterator[openai.OpenAI]:
    """The official client."""
    with openai.OpenAI(base_url=f"{talker.base_url}/v1", api_key="tml-one", max_retries=0) as client:
        yield client


def test_the_official_client_streams_what_it_gets_whole(openai_client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": ["hello world", [3, 4]], "n": 2, "max_tokens": 9, "seed": 3}
    whole = openai_client.completions.create(**asked, logprobs=2)
    texts: dict[int, str] = defaultdict(str)
    tokens: dict[int, list[str]] = defaultdict(list)
    scores: dict[int, list[float]] = defaultdict(list)
    ends: dict[int, str | None] = {}
    pieces = list(openai_client.completions.create(**asked, logprobs=2, stream=True))
    for piece in pieces:
        for choice in piece.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens
            scores[choice.index] += choice.logprobs.token_logprobs
            ends[choice.index] = choice.finish_reason
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert tokens[choice.index] == choice.logprobs.tokens
        assert scores[choice.index] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
        assert ends[choice.index] == choice.finish_reason
        assert [len(top) for top in choice.logprobs.top_logprobs] == [2] * len(choice.logprobs.tokens)
    assert len({piece.id for piece in pieces}) == 1


def test_the_official_client_chats_with_log_probs_stops_and_usage(openai_client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_completion_tokens": 12,
        "seed": 8,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = openai_client.chat.completions.create(**asked)
    content = whole.choices[0].logprobs.content
    assert whole.usage.completion_tokens == len(content)
    assert all(len(one.top_logprobs) == 3 for one in content)
    assert all(one.logprob <= one.top_logprobs[0].logprob + 1e-6 for one in content)
    pieces = list(openai_client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(c.delta.content for piece in pieces for c in piece.choices) == whole.choices[0].message.content
    assert pieces[-1].usage == whole.usage
    assert pieces[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    again = openai_client.chat.completions.create(**{**asked, "seed": 9})
    assert again.choices[0].logprobs.content != content


def test_a_stop_string_ends_the_text_before_it(openai_client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": [5, 6], "max_tokens": 60, "seed": 1}
    text = openai_client.completions.create(**asked).choices[0].text
    assert len(text) > 20
    word = text[9:12]
    for stream in (False, True):
        stopped = openai_client.completions.create(**asked, stop=[word, text[8:16]], stream=stream)
        choices = [piece.choices[0] for piece in stopped] if stream else stopped.choices
        assert "".join(choice.text for choice in choices) == text[: text.index(word)]
        assert choices[-1].finish_reason == "stop"


def test_a_failure_has_its_status_also_when_a_stream_was_asked_for(openai_client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": [5, 6], "max_tokens": 4, "stream": True}
    with pytest.raises(openai.BadRequestError, match="limit is 256"):
        openai_client.completions.create(model="tiny", **{**asked, "max_tokens": 4000})
    with pytest.raises(openai.NotFoundError, match="there is no tinker"):
        openai_client.completions.create(model="tinker://nobody/sampler_weights/v1", **asked)


async def test_who_leaves_a_stream_frees_the_place(talker: httpx.Client, service: Service) -> None:
    asked = {"model": "tiny", "prompt": [5, 6], "n": 256, "max_tokens": 240, "stream": True}
    async with connect(service.state) as client, httpx.AsyncClient(base_url=talker.base_url) as http:
        ended = client.events(["@sample"], since="0")
        async with http.stream("POST", "/v1/completions", json=asked, headers=talker.headers) as answer:
            first = json.loads((await anext(answer.aiter_lines())).removeprefix("data: "))
        async with asyncio.timeout(30):
            async for seen in ended:
                if isinstance(seen, Streamed) and first["id"] == f"cmpl-{seen.event.id}":
                    assert seen.event.error is not None
                    assert seen.event.error["code"] == "cancelled"
                    break

"""OpenAI's completions and chat completions over the samplers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from door_app import Running, running
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from tinsmith.api.http.settings import HttpSettings

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.fixture(scope="module")
def talker(settings: HttpSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a door whose model has a tokenizer and a chat template."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    words = {word: at for at, word in enumerate(["[UNK]", "user", "assistant", "hello", "world"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    with running(settings.model_copy(update={"model_path": str(folder)})) as app:
        yield app.http()


def test_a_text_is_continued_as_often_as_asked(talker: httpx.Client) -> None:
    asked = {"model": "tiny", "prompt": "hello world", "n": 2, "max_tokens": 3, "seed": 1, "logprobs": 1}
    answer = talker.post("/v1/completions", json=asked).json()
    assert answer["usage"]["prompt_tokens"] == 2
    assert [len(choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]] == [3, 3]
    assert all(choice["finish_reason"] == "length" for choice in answer["choices"])
    assert talker.post("/oai/api/v1/completions", json=asked).json()["choices"] == answer["choices"]


def test_a_conversation_goes_through_the_chat_template(talker: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hello"}]
    asked = {"model": "tiny", "messages": messages, "max_tokens": 2}
    answer = talker.post("/v1/chat/completions", json=asked).json()
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize(
    "change", [{"stream": True}, {"logit_bias": {}}, {"model": "gpt"}, {"temperature": "hot"}, {"presence_penalty": 1}]
)
def test_what_can_not_be_done_as_asked_is_refused(talker: httpx.Client, change: dict[str, object]) -> None:
    answer = talker.post("/v1/completions", json={"model": "tiny", "prompt": "hello", **change})
    assert answer.status_code == 400
    assert next(iter(change)) in answer.json()["detail"] or "path" in answer.json()["detail"]


def test_a_model_without_a_tokenizer_takes_token_ids_alone(app: Running) -> None:
    http = app.http()
    ids = http.post("/v1/completions", json={"model": "tiny", "prompt": [1, 2], "max_tokens": 2})
    assert ids.json()["usage"]["total_tokens"] >= 3
    text = http.post("/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 2})
    assert text.status_code == 400
    assert "tiny" in [model["id"] for model in http.get("/v1/models").json()["data"]]

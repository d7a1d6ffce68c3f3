"""A live service with the official SDK before it: its clients, things to call them with, and a log of what they ask."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tinker
from tinker import types

KEY = "tml-one"
UNASKED = ("/retrieve_future", "/retrieve_futures", "/session_heartbeat", "/client/config", "/client/dynamic_config")
"""Requests that a client makes of itself, or for every result."""


@dataclass
class Asked:
    """Which endpoints were asked since `clear`, each once, in order; as their paths are declared, without ids."""

    found: list[str] = field(default_factory=list)

    def around(self, app: Callable[..., Any]) -> Callable[..., Any]:
        """The application, watched."""

        async def watched(scope: dict[str, Any], receive: Any, send: Any) -> None:
            try:
                await app(scope, receive, send)
            finally:
                if scope["type"] == "http":
                    path = getattr(scope.get("route"), "path", scope["path"])
                    line = f"{scope['method']} {path.removeprefix('/api/v1')}"
                    if not path.endswith(UNASKED) and line not in self.found:
                        self.found.append(line)

        return watched


def settle(value: Any) -> Any:
    """What a call of the SDK comes to, whether it returns it, a future of it, or a coroutine of either."""
    if inspect.iscoroutine(value):
        value = asyncio.run(value)
    while callable(getattr(value, "result", None)):
        value = value.result(timeout=60)
    return value


def make_tokenizer(folder: Path) -> None:
    """A tokenizer of two words."""
    folder.mkdir(parents=True)
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))


def datum(tokens: int = 6) -> types.Datum:
    """Counts from 1; each target is the next number."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(range(1, tokens + 1))),
        loss_fn_inputs={"target_tokens": list(range(2, tokens + 2)), "weights": [1.0] * tokens},
    )


PICTURE = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=1)])
PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=2, seed=1)


class Bench:
    """The clients of one session, made at their first use."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.service = tinker.ServiceClient(base_url=url, api_key=KEY)
        self.rest = tinker.RestClient(base_url=url, api_key=KEY)
        self.admin = tinker.AdminClient(base_url=url, api_key=KEY)
        self.training: tinker.TrainingClient = self.service.create_lora_training_client("local/tiny", rank=2).result()
        self.sampling: tinker.SamplingClient = self.service.create_sampling_client(base_model="local/tiny").result()
        self.sampler: str = self.sampling._sampling_session_id
        self.run: str = self.training.model_id
        self.session = self.run.partition(":")[0]
        self._numbers = itertools.count()
        self.state = self.fresh_state()
        self.version: str = self.training.save_weights_for_sampler(self.name()).result().path
        self.external: str = self.training.save_weights_external(self.name()).result().path

    def name(self) -> str:
        """A name that no checkpoint has."""
        return f"n{next(self._numbers)}"

    def fresh_state(self) -> str:
        """The path of a checkpoint that no other call uses."""
        return str(self.training.save_state(self.name()).result().path)

    def backward(self) -> tinker.TrainingClient:
        """The training client, with gradients."""
        self.training.forward_backward([datum()], "cross_entropy").result()
        return self.training

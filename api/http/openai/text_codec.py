"""Text to tokens and back for the OpenAI endpoints, from the tokenizer files beside the model; no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from tinsmith.bus.protocol.errors import InvalidInput

TOKEN_ID = "token_id:"
"""Begins the name of a token that has no text of its own, so that no two tokens look the same."""


@dataclass(frozen=True)
class TextCodec:
    """A fast tokenizer and, where the model has one, its chat template."""

    tokenizer: Tokenizer
    template: str | None
    special: Mapping[str, str]
    """bos_token, eos_token and their like, which templates name."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; with what the tokenizer puts around a text unless `special` is false."""
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, special tokens left out."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def name(self, token: int) -> str:
        """The text of one token, special ones by their names; `token_id:N` where it is no whole character."""
        text = str(self.tokenizer.decode([token], skip_special_tokens=False))
        return f"{TOKEN_ID}{token}" if "\ufffd" in text else text

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt of a conversation whose next turn is the assistant's. Raises InvalidInput."""
        if self.template is None:
            raise InvalidInput("this model has no chat template", remedy="Use /v1/completions.", field="messages")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        try:
            template = environment.from_string(self.template)
            text = template.render(messages=list(messages), add_generation_prompt=True, **self.special)
        except (TemplateError, TypeError, KeyError) as error:
            raise InvalidInput(f"the chat template can't render it: {error}", field="messages") from None
        return self.encode(text, special=False)


def load_codec(model_path: str) -> TextCodec:
    """Raises InvalidInput when the model's folder has no fast tokenizer."""
    folder = Path(model_path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise InvalidInput(
            "this model has no tokenizer.json to read text with", remedy="Send token ids as the prompt.", field="prompt"
        )
    config: dict[str, Any] = {}
    if (folder / "tokenizer_config.json").is_file():
        config = json.loads((folder / "tokenizer_config.json").read_text())
    template = config.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text()
    named = {key: _text(value) for key, value in config.items() if key.endswith("_token") and value is not None}
    return TextCodec(Tokenizer.from_file(str(file)), template if isinstance(template, str) else None, named)


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _refuse(message: str) -> None:
    raise TemplateError(message)

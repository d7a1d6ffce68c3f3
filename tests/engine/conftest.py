"""Tiny models on disk, one of each kind a session."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tiny import tiny_model


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The path of a tiny random model of that kind (see tiny.tiny_config); `llama-tied` has a tied head."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            name, _, tied = kind.partition("-")
            changes = {"tie_word_embeddings": tied == "tied"} if name == "llama" else {}
            made[kind] = tiny_model(tmp_path_factory.mktemp(kind) / "base", name, **changes)
        return made[kind]

    return get


@pytest.fixture(scope="session")
def llama(model_of: Callable[[str], Path]) -> Path:
    """A tiny Llama with an untied head."""
    return model_of("llama")

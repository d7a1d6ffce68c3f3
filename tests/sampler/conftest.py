"""A small random model, a byte-level tokenizer for it, and prompts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import make_tokenizer
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))

from sampling_runs import VOCAB, tiny_llama


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def prompts() -> list[np.ndarray]:
    """Eight prompts of different lengths."""
    rng = np.random.default_rng(7)
    return [rng.integers(3, VOCAB, n).astype(np.int32) for n in (1, 3, 5, 9, 14, 22, 30, 41)]

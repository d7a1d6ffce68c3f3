"""A small random model, a byte-level tokenizer for it, and prompts."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent))

from sampling_runs import END, VOCAB, tiny_llama


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Three special tokens, then ASCII and some other bytes, one token a byte."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    ascii_first = sorted(alphabet, key=lambda c: (len(c.encode()), c))
    vocab = {"<pad>": 0, "<s>": 1, "</s>": END}
    # Bytes of "é" and "€" take part, so that a character can be split between tokens.
    wanted = [*ascii_first[:94], *(c for c in ("Ã", "©", "â", "Ĥ", "¬")), "Ġ", "Ċ"]
    rest = [c for c in ascii_first if c not in wanted]
    for c in dict.fromkeys([*wanted, *rest]):
        if len(vocab) < VOCAB:
            vocab[c] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.fixture
def prompts() -> list[np.ndarray]:
    """Eight prompts of different lengths."""
    rng = np.random.default_rng(7)
    return [rng.integers(3, VOCAB, n).astype(np.int32) for n in (1, 3, 5, 9, 14, 22, 30, 41)]

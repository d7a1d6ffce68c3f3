"""A small random Llama, a way to run requests to their end, and what transformers itself gives for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tinsmith.actors.sampling.engines.builtin.generator import Generator
from tinsmith.actors.sampling.engines.builtin.sample import Failed, Finished, SampleRequest
from tinsmith.bus.protocol.commands import SampleArgs

VOCAB = 160
END = 2


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Two layers of width 32, grouped attention, weights large enough that the next token is not uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=END,
        bos_token_id=1,
        pad_token_id=0,
        **changes,
    )
    return LlamaForCausalLM(config).eval()


def request(id: str, prompt: Any, version: str = "base", **args: Any) -> SampleRequest:
    return SampleRequest(id, np.asarray(prompt, dtype=np.int64), SampleArgs(**args), version)


def drain(generator: Generator) -> dict[str, Finished | Failed]:
    """Step until nothing is left; answers by id."""
    answers: dict[str, Finished | Failed] = {}
    while generator.busy:
        for answer in generator.step():
            assert answer.id not in answers
            answers[answer.id] = answer
    return answers


def run(generator: Generator, requests: Sequence[SampleRequest]) -> dict[str, Finished]:
    """Submit all, drain; every one must succeed."""
    for one in requests:
        generator.submit(one)
    answers = drain(generator)
    assert all(isinstance(answer, Finished) for answer in answers.values()), answers
    return answers  # type: ignore[return-value]


def greedy(model: Any, prompt: np.ndarray, max_tokens: int) -> list[int]:
    """transformers' own greedy continuation of one prompt alone, without an end token."""
    ids = torch.tensor(np.asarray(prompt, dtype=np.int64))[None]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()


def forward_logprobs(model: Callable[..., Any], tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-prob of each token but the first under the model's own forward: float32 [n - 1]."""
    ids = torch.tensor(np.asarray(tokens, dtype=np.int64))[None]
    with torch.no_grad():
        logp = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float() / temperature, -1)
    return logp.gather(1, ids[0, 1:, None])[:, 0].numpy()

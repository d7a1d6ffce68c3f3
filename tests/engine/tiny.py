"""Tiny random models on disk, and batches for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tinsmith.bus.protocol.datum import Datum

VOCAB = 160
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "attention_dropout": 0.1,
}


def tiny_config(kind: str = "llama", **changes: Any) -> Any:
    """A small config of the architecture: llama, qwen3, gemma3, gpt2, granite, mixtral or qwen3_moe."""
    import transformers as t

    sizes = {**_SIZES, **changes}
    if kind == "gpt2":
        return t.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=1)
    if kind == "gemma3":
        sizes = {"head_dim": 8, "sliding_window": 8, "final_logit_softcapping": 5.0, **sizes}
        return t.Gemma3TextConfig(**sizes)
    if kind == "qwen3":
        return t.Qwen3Config(head_dim=8, **sizes)
    if kind == "granite":
        return t.GraniteConfig(logits_scaling=4.0, **sizes)
    if kind == "mixtral":
        return t.MixtralConfig(num_local_experts=4, **sizes)
    if kind == "qwen3_moe":
        return t.Qwen3MoeConfig(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, **sizes)
    return t.LlamaConfig(**sizes)


def tiny_model(path: Path, kind: str = "llama", **changes: Any) -> Path:
    """Save a random model of `tiny_config` at `path`; weights are large enough that distributions are far from flat."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(kind, **changes))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(4.0)
    model.save_pretrained(path)
    return path


def batch(count: int = 7, *, loss: str = "cross_entropy", seed: int = 0) -> list[Datum]:
    """Datums of 1 to 20 tokens with random inputs for the loss; some tokens bear no loss."""
    random = np.random.default_rng(seed)
    data = []
    for _ in range(count):
        n = int(random.integers(1, 21))
        inputs: dict[str, Any] = {"target_tokens": random.integers(0, VOCAB, n)}
        if loss == "cross_entropy":
            inputs["weights"] = random.choice([0.0, 0.5, 1.0], n).astype(np.float32)
        else:
            inputs["logprobs"] = random.normal(-5, 0.5, n).astype(np.float32)
            inputs["advantages"] = random.normal(0, 1, n).astype(np.float32)
        data.append(Datum(random.integers(0, VOCAB, n), inputs))
    return data

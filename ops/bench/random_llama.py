"""Random Llamas of any size, for measuring: the same weights for the same arguments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from tinsmith.bus.protocol.datum import Datum


def make_llama(path: Path, *, vocab: int, hidden: int, layers: int, context: int) -> Path:
    """Write the model to `path`, without a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 8 * 8,
        num_hidden_layers=layers,
        num_attention_heads=max(4, hidden // 64),
        num_key_value_heads=max(2, hidden // 128),
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    logging.disable_progress_bar()
    model.save_pretrained(path)
    return path


def make_data(lengths: npt.NDArray[np.integer], vocab: int, seed: int = 0) -> list[Datum]:
    """Datums of random tokens and targets, for cross_entropy."""
    rng = np.random.default_rng(seed)
    return [Datum(rng.integers(3, vocab, n), {"target_tokens": rng.integers(3, vocab, n)}) for n in lengths.tolist()]

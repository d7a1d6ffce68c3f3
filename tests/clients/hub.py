"""A folder in which client programs find tokenizers and data sets by their usual names, without a network.

A local directory `org/name` under the working directory wins over the hub of that name.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ALIASES = ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-4B-Instruct-2507")
"""Names of base models that the programs ask for."""

_CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>"]
_ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def conversations() -> list[list[dict[str, str]]]:
    """The example conversations that the client package ships; contents as text."""
    import tinker_cookbook

    file = Path(tinker_cookbook.__file__).parent / "example_data" / "conversations.jsonl"
    chats = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    return [[{"role": turn["role"], "content": _text(turn["content"])} for turn in chat] for chat in chats]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content)


def make_tokenizer(folder: Path) -> int:
    """A byte-level BPE of about 1,000 tokens with the control tokens of the programs' renderers; returns its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=_CONTROL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator((turn["content"] for chat in conversations() for turn in chat), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_tokens(_ADDED)
    fast.save_pretrained(folder)
    return len(fast)


def make_hub(folder: Path, tokenizer: Path) -> None:
    """Lay out tokenizers and data sets under `folder`."""
    for name in ALIASES:
        place = folder / name
        place.mkdir(parents=True)
        for file in tokenizer.iterdir():
            (place / file.name).write_bytes(file.read_bytes())
    rows = [{"messages": chat} for chat in conversations()]
    _write(folder / "HuggingFaceH4" / "no_robots" / "train.jsonl", rows[:112])
    _write(folder / "HuggingFaceH4" / "no_robots" / "test.jsonl", rows[112:])
    rng = random.Random(0)
    for part, count in (("train", 64), ("test", 16)):
        _write(folder / "openai" / "gsm8k" / "main" / f"{part}.jsonl", (_sum(rng) for _ in range(count)))
    (folder / "openai" / "gsm8k" / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - split: train\n    path: main/train.jsonl\n  - split: test\n    path: main/test.jsonl\n---\n"
    )


def _sum(rng: random.Random) -> dict[str, str]:
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    return {"question": f"Add {a} and {b}.", "answer": f"{a}+{b}={a + b}\n#### {a + b}"}


def _write(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

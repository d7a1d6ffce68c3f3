"""Trained weights in the formats that others load: a PEFT adapter, or a plain Hugging Face checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from safetensors.torch import save_file
from torch import Tensor, nn

from tinsmith.actors.engine.checkpoint import bytes_of, write_directory
from tinsmith.actors.engine.model.base import load_tokenizer, locate
from tinsmith.actors.engine.trainable.lora import TrainedAdapter, lora_config, short_targets
from tinsmith.bus.protocol.commands import LoraSpec

ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What the names of an adapter's tensors begin with, before the path of the layer."""
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "added_tokens.json",
)


def publish_adapter(path: Path, module: nn.Module, adapter: TrainedAdapter, base: str | Path) -> None:
    """A directory that peft.PeftModel.from_pretrained loads: every tensor, and target_modules spelt out."""
    tensors = {name: param.detach().cpu() for name, param in adapter.params.items()}
    write_adapter(path, tensors, adapter.spec, short_targets(module, adapter.targets), base)


def write_adapter(
    path: Path, tensors: Mapping[str, Tensor], spec: LoraSpec, targets: list[str], base: str | Path
) -> None:
    """The same from tensors named `<layer>.lora_A.weight` and `<layer>.lora_B.weight`. Raises DiskFull."""
    config = lora_config(spec, targets).to_dict()
    config.update(base_model_name_or_path=str(base), inference_mode=True)
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    named = {PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}

    def fill(directory: Path) -> None:
        save_file(named, directory / ADAPTER_TENSORS, metadata={"format": "pt"})
        (directory / ADAPTER_CONFIG).write_text(json.dumps(plain, indent=2, sort_keys=True, default=str))

    write_directory(path, fill, bytes_of(named.values()))


def publish_full(path: Path, module: nn.Module, weights: Mapping[str, Tensor], base: str | Path) -> None:
    """A directory that AutoModelForCausalLM.from_pretrained loads, with the base's tokenizer where it has files.

    Raises DiskFull.
    """

    def fill(directory: Path) -> None:
        cast(Any, module).save_pretrained(directory, state_dict=dict(weights))
        if Path(base).exists():
            _put_tokenizer(base, directory)

    write_directory(path, fill, bytes_of(weights.values()))


def _put_tokenizer(base: str | Path, directory: Path) -> None:
    origin, gguf = locate(base)
    if gguf:
        load_tokenizer(base).save_pretrained(directory)
        return
    for pattern in _TOKENIZER_FILES:
        for file in origin.glob(pattern):
            shutil.copyfile(file, directory / file.name)

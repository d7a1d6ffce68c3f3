"""Trained weights in the formats that others load: a PEFT adapter, or a plain Hugging Face checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

from safetensors.torch import save_file
from torch import Tensor, nn

from tinsmith.actors.engine.checkpoint import write_directory
from tinsmith.actors.engine.lora import Adapter, lora_config, short_targets

_PREFIX = "base_model.model."
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "added_tokens.json",
)


def publish_adapter(path: Path, module: nn.Module, adapter: Adapter, base: str | Path) -> None:
    """A directory that peft.PeftModel.from_pretrained loads: every tensor, and target_modules spelt out."""
    config = lora_config(adapter.spec, short_targets(module, adapter.targets)).to_dict()
    config.update(base_model_name_or_path=str(base), inference_mode=True)
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    tensors = {_PREFIX + name: param.detach().cpu().contiguous() for name, param in adapter.params.items()}

    def fill(directory: Path) -> None:
        save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
        (directory / "adapter_config.json").write_text(json.dumps(plain, indent=2, sort_keys=True, default=str))

    write_directory(path, fill)


def publish_full(path: Path, module: nn.Module, weights: dict[str, Tensor], base: str | Path) -> None:
    """A directory that AutoModelForCausalLM.from_pretrained loads, with the base's tokenizer where it has files."""

    def fill(directory: Path) -> None:
        cast(Any, module).save_pretrained(directory, state_dict=weights)
        origin = Path(base)
        for pattern in _TOKENIZER_FILES if origin.is_dir() else ():
            for file in origin.glob(pattern):
                shutil.copyfile(file, directory / file.name)

    write_directory(path, fill)

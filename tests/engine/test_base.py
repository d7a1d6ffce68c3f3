"""What can't be loaded whole, or not scored exactly, is refused with its reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny import VOCAB, tiny_model

from tinsmith.actors.engine.model.base import load_base, load_tokenizer
from tinsmith.bus.protocol.errors import NotAModel, UnsupportedModel


def test_the_facts_of_a_model(llama: Path, model_of: Callable[[str], Path]) -> None:
    info = load_base(llama, name="tiny").info
    assert (info.name, info.vocab_size, info.context, info.eos, info.layers) == ("tiny", VOCAB, 64, (1,), 2)
    assert not info.tied
    assert load_base(model_of("llama-tied")).info.tied


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", Path(__file__)):
        with pytest.raises(NotAModel, match="Remedy"):
            load_base(path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NotAModel):
        load_base(tmp_path)


def test_a_missing_weight_is_refused_and_never_made_up(llama: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(llama, tmp_path / "cut"))
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NotAModel, match=r"layers\.1\.mlp\.up_proj"):
        load_base(path)


def test_a_model_without_tokenizer_files_has_none(llama: Path) -> None:
    with pytest.raises(NotAModel, match="tokenizer"):
        load_tokenizer(llama)


def test_head_logic_that_scoring_does_not_know_is_refused(
    llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from transformers import LlamaForCausalLM

    plain = LlamaForCausalLM.forward

    def doubled(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        out = plain(self, *args, **kwargs)
        out.logits = out.logits * self.config.output_multiplier
        return out

    path = Path(shutil.copytree(llama, tmp_path / "odd"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "output_multiplier": 2.0}))
    monkeypatch.setattr(LlamaForCausalLM, "forward", doubled)
    with pytest.raises(UnsupportedModel, match="output_multiplier"):
        load_base(path)


def test_dropout_of_the_config_never_runs(llama: Path) -> None:
    import torch

    module = load_base(llama).module
    tokens = torch.arange(10)[None]
    assert torch.equal(module(input_ids=tokens).logits, module(input_ids=tokens).logits)


def test_a_tied_model_loads_though_its_head_is_not_in_the_file(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    assert load_base(path).info.tied

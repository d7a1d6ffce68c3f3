"""Adapters: chosen layers, seeded start, many beside each other without a trace of one in another."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tinsmith.actors.engine.model.base import load_base
from tinsmith.actors.engine.trainable.lora import AdapterBank, target_modules
from tinsmith.bus.protocol.commands import LoraSpec
from tinsmith.bus.protocol.errors import UnsupportedModel


def bank(path: Path) -> AdapterBank:
    return AdapterBank(load_base(path).module)


def last_names(targets: list[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in targets}


def test_flags_choose_the_linear_layers(llama: Path) -> None:
    module = load_base(llama).module
    attn, mlp = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    assert last_names(target_modules(module, LoraSpec(rank=2))) == attn | mlp
    assert last_names(target_modules(module, LoraSpec(rank=2, mlp=False))) == attn
    assert last_names(target_modules(module, LoraSpec(rank=2, attn=False, unembed=True))) == mlp | {"lm_head"}


def test_targets_are_the_same_after_other_adapters_were_added(llama: Path) -> None:
    adapters = bank(llama)
    spec = LoraSpec(rank=2, unembed=True)
    before = target_modules(adapters.module, spec)
    adapters.add(spec)
    assert target_modules(adapters.module, spec) == before


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_fused_experts_are_refused_and_attention_works(model_of: Callable[[str], Path], kind: str) -> None:
    adapters = bank(model_of(kind))
    with pytest.raises(UnsupportedModel, match=r"'mlp'.*lora\.mlp = false"):
        adapters.add(LoraSpec(rank=2))
    assert last_names(adapters.add(LoraSpec(rank=2, mlp=False)).targets) == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "gpt2", "granite"])
def test_other_architectures_are_adapted(model_of: Callable[[str], Path], kind: str) -> None:
    adapter = bank(model_of(kind)).add(LoraSpec(rank=2))
    assert len(adapter.params) == 2 * len(adapter.targets)


def test_the_seed_alone_decides_the_start(llama: Path) -> None:
    first = bank(llama)
    second = bank(llama)
    second.add(LoraSpec(rank=8, seed=1))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one, two = first.add(LoraSpec(rank=4, seed=7)), second.add(LoraSpec(rank=4, seed=7))
    other = second.add(LoraSpec(rank=4, seed=8))
    assert torch.equal(torch.get_rng_state(), state)
    assert list(one.params) == list(two.params)
    for name in one.params:
        assert torch.equal(one.params[name], two.params[name])
        assert name.endswith("lora_B.weight") != bool(one.params[name].any())
    assert not all(torch.equal(two.params[name], other.params[name]) for name in two.params)


def test_a_new_adapter_changes_nothing_and_the_active_one_alone_acts(llama: Path) -> None:
    adapters = bank(llama)
    tokens = torch.arange(8)[None]

    def logits() -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = adapters.module(input_ids=tokens).logits
            return result

    bare = logits()
    a, b = adapters.add(LoraSpec(rank=2)), adapters.add(LoraSpec(rank=3, mlp=False))
    adapters.activate(a)
    assert torch.equal(logits(), bare)
    for param in a.params.values():
        param.data.fill_(0.1)
    trained = logits()
    assert not torch.allclose(trained, bare)
    adapters.activate(b)
    assert torch.equal(logits(), bare)
    adapters.remove(b)
    adapters.activate(a)
    assert torch.equal(logits(), trained)


def test_a_removed_adapter_is_freed(llama: Path) -> None:
    adapters = bank(llama)
    kept, gone = adapters.add(LoraSpec(rank=2)), adapters.add(LoraSpec(rank=2))
    watch = [weakref.ref(param) for param in gone.params.values()]
    adapters.remove(gone)
    del gone
    gc.collect()
    assert not any(ref() is not None for ref in watch)
    assert all(param.requires_grad for param in kept.params.values())

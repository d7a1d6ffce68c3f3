"""LoRA adapters: many on one frozen base, one active at a time, each a set of plain replicated parameters.

peft makes and runs the layers; here they are chosen, seeded, switched and removed. Adapters are added after the base
was sharded, so that FSDP does not manage them: their gradients stay local until the optimizer step sums them.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tinsmith.actors.engine.model.base import layers_of
from tinsmith.bus.protocol.commands import LoraSpec
from tinsmith.bus.protocol.errors import UnsupportedModel

_ATTENTION = ("attn", "attention", "mixer")
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})


def target_modules(module: nn.Module, spec: LoraSpec) -> list[str]:
    """Full names of the linear layers that `spec` adapts, in module order; embeddings and MoE routers never are.

    A linear in a decoder layer belongs to attention when its path says so, otherwise to the MLP. Raises
    UnsupportedModel when a flag asks for a kind of which there is no linear layer (for instance experts whose weights
    are fused into one parameter).
    """
    prefix, layers = layers_of(module)
    found: dict[str, list[str]] = {"attn": [], "mlp": [], "unembed": []}
    for name, child in layers.named_modules():
        parts = [part for part in name.split(".") if part != "base_layer"]
        if isinstance(child, LoraLayer) or "lora_A" in parts or "lora_B" in parts:
            continue
        if isinstance(child, (nn.Linear, Conv1D)) and parts[-1] not in _ROUTERS:
            attention = any(word in part for part in parts for word in _ATTENTION)
            found["attn" if attention else "mlp"].append(".".join([prefix, *parts]))
    head = cast(Any, module).get_output_embeddings()
    plain = head.base_layer if isinstance(head, LoraLayer) else head
    found["unembed"] = [name for name, child in module.named_modules() if child is head or child is plain][:1]
    for kind, names in found.items():
        if getattr(spec, kind) and not names:
            raise UnsupportedModel(
                f"{type(module).__name__} has no linear layer of the kind {kind!r} that can be adapted",
                field=kind,
                remedy=f"Create the model with lora.{kind} = false.",
            )
    return [name for kind, names in found.items() if getattr(spec, kind) for name in names]


def short_targets(module: nn.Module, targets: list[str]) -> list[str]:
    """`targets` as last names (q_proj, ...) where those choose the same layers, as peft matches; else unchanged."""
    chosen = set(targets)
    last = {name.rpartition(".")[2] for name in targets}
    for name, child in module.named_modules():
        name = ".".join(part for part in name.split(".") if part != "base_layer")
        if name not in chosen and name.rpartition(".")[2] in last and isinstance(child, (nn.Linear, Conv1D)):
            return sorted(targets)
    return sorted(last)


def lora_config(spec: LoraSpec, targets: list[str]) -> LoraConfig:
    """peft's own description of the adapter."""
    return LoraConfig(
        r=spec.rank,
        lora_alpha=spec.scale * spec.rank,
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        inference_mode=False,
    )


@dataclass(frozen=True)
class TrainedAdapter:
    """One adapter: peft's internal name, and its parameters by PEFT tensor name without the common prefix."""

    key: str
    spec: LoraSpec
    targets: list[str]
    params: dict[str, nn.Parameter]


class AdapterBank:
    """All adapters of one base module; at most one is active."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._made = 0
        self._active: str | None = None
        self._layers: list[LoraLayer] = []

    def add(self, spec: LoraSpec) -> TrainedAdapter:
        """A new adapter whose output is zero (B = 0).

        A is Kaiming-uniform, bound 1 / sqrt(fan in) as peft's own, from a generator seeded by the spec's seed and the
        layer's name: equal on every rank, whatever was created before, and the global generator is left alone.
        """
        targets = target_modules(self.module, spec)
        key = f"a{self._made}"
        self._made += 1
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # peft warns of what is meant here: several adapters, Conv1D layers, an adapter on a tied head.
            warnings.simplefilter("ignore")
            inject_adapter_in_model(lora_config(spec, targets), cast(Any, self.module), key)
        self._layers = [layer for layer in self.module.modules() if isinstance(layer, LoraLayer)]
        params: dict[str, nn.Parameter] = {}
        for name, layer in self.module.named_modules():
            if isinstance(layer, LoraLayer) and key in layer.lora_A:
                for part in ("lora_A", "lora_B"):
                    linear = getattr(layer, part)[key]
                    linear.to(torch.float32)
                    params[f"{name}.{part}.weight"] = linear.weight
        if len(params) != 2 * len(targets):
            raise UnsupportedModel(f"{len(targets)} layers were to be adapted, peft adapted {len(params) // 2}")
        for name, param in params.items():
            _initialise(param, spec.seed, name)
        self._settle()
        return TrainedAdapter(key, spec, targets, params)

    def remove(self, adapter: TrainedAdapter) -> None:
        """Take the adapter's parameters out of the module."""
        self.activate(None)
        for layer in self._layers:
            layer.delete_adapter(adapter.key)
        cast(Any, self.module).peft_config.pop(adapter.key)
        self._settle()

    def activate(self, adapter: TrainedAdapter | None) -> None:
        """Run this adapter (None: the bare base) from now on.

        peft's own set_adapter also switches requires_grad of every adapter; an adapter that is not active takes no
        part in the graph, so naming the active one is enough.
        """
        key = adapter.key if adapter is not None else None
        if key != self._active:
            names = [] if key is None else [key]
            for layer in self._layers:
                layer.__dict__["_active_adapter"] = names
            self._active = key

    def _settle(self) -> None:
        """Undo what peft chose to be active and trainable while adding or removing."""
        for layer in self._layers:
            for part in (layer.lora_A, layer.lora_B):
                part.requires_grad_(True)
        self._active = "unsettled"
        self.activate(None)


@torch.no_grad()
def _initialise(param: Tensor, seed: int, name: str) -> None:
    if name.endswith("lora_B.weight"):
        param.zero_()
        return
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1.0 / math.sqrt(param.shape[1])
    param.copy_(torch.empty(param.shape).uniform_(-bound, bound, generator=generator))

"""The module that FSDP shards: tokens and targets in, log-probs and entropies out, with the output head inside.

The head and the embedding belong to the root unit, so both are whole while `forward` runs; a tied head is one
parameter. Rows are right-padded: a causal model never lets a valid token see the padding, so no mask is needed.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tinsmith.actors.engine.model.base import BaseModel, decoder_of, layers_of
from tinsmith.actors.engine.model.head import HeadMath, score_frozen, score_general

Reshard = Literal["after_forward", "after_backward", "never"]
"""When gathered parameters are freed: earlier holds less memory, later communicates less. `never` suits a frozen base
that fits each rank whole."""


class Scorer(nn.Module):
    """Log-probs and entropies of a causal LM."""

    def __init__(self, base: BaseModel) -> None:
        super().__init__()
        self.model = base.module
        self.math: HeadMath = base.math

    def forward(self, tokens: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probs float32 of the shape of targets, entropy float32 [rows, L]); 0 where mask is false.

        tokens int64 [rows, L], targets int64 [rows, L] or [rows, L, K], mask bool [rows, L].
        """
        hidden = decoder_of(self.model)(input_ids=tokens, use_cache=False)[0][mask]
        flat = targets[mask]
        chosen = flat if flat.ndim == 2 else flat[:, None]
        logprobs, entropy = self._score(hidden, chosen)
        every = torch.zeros(targets.shape, dtype=torch.float32, device=tokens.device)
        spread = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        spread[mask] = entropy.detach()
        return every.masked_scatter(mask.reshape(mask.shape + (1,) * (targets.ndim - 2)), logprobs), spread

    def _score(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        head = cast(Any, self.model).get_output_embeddings()
        plain = head
        if isinstance(head, LoraLayer):
            adapted = any(name in head.lora_A for name in head.active_adapters)
            plain = None if adapted else head.base_layer
        if plain is not None and not (plain.weight.requires_grad and torch.is_grad_enabled()):
            return score_frozen(hidden, plain.weight, plain.bias, targets, self.math)
        vocab = (head if plain is not None else head.base_layer).weight.shape[0]
        return score_general(hidden, head, vocab, targets, self.math)


def shard(
    scorer: Scorer, mesh: DeviceMesh | None, device: torch.device, reshard: Reshard, compute: torch.dtype
) -> None:
    """Shard each decoder layer and the rest (FSDP2), in place; without a mesh only move to the device.

    Weights are gathered in the dtype `compute`. Gradients are float32 or better, summed over ranks, never averaged.
    """
    if mesh is None:
        scorer.to(device)
        return
    forward = reshard == "after_forward"
    held = next(scorer.parameters()).dtype
    policy = MixedPrecisionPolicy() if held == compute else MixedPrecisionPolicy(compute, torch.float32)
    for layer in layers_of(scorer.model)[1]:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=forward)
    fully_shard(scorer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for unit in units(scorer):
        unit.set_gradient_divide_factor(1.0)
        # A factor equal to the number of ranks (1 of 1) would ask for an average, which gloo does not have.
        unit.set_force_sum_reduction_for_comms(True)
        # Experts that no token of this rank chose have no gradient here, but another rank may have one.
        unit.set_reduce_scatter_unused_params(True, recurse=False)
        unit.set_reshard_after_backward(reshard != "never", recurse=False)
    for buffer_owner in scorer.modules():
        for name, buffer in buffer_owner.named_buffers(recurse=False):
            buffer_owner._buffers[name] = buffer.to(device)


def units(scorer: nn.Module) -> list[FSDPModule]:
    """The FSDP units; none when not sharded."""
    return [module for module in scorer.modules() if isinstance(module, FSDPModule)]


def free(scorer: nn.Module) -> None:
    """Drop gathered parameters: after the sharded ones have changed, the gathered ones are stale."""
    for unit in units(scorer):
        unit.reshard()


def checkpoint_layers(scorer: Scorer) -> None:
    """Recompute each decoder layer in backward instead of keeping its activations.

    Only the layers themselves are put into training mode, which is what asks for recomputation; everything inside
    stays in evaluation mode, so no dropout ever runs.
    """
    cast(Any, scorer.model).gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers_of(scorer.model)[1]:
        layer.training = True

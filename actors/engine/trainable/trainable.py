"""One trained model on this rank: adapters on the shared base, or a sharded copy of the base of its own.

Both kinds show the engine the same thing: named parameters, plain and replicated (adapters) or DTensors (full
fine-tuning), whose `.grad` accumulates sums over tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tinsmith.actors.engine.collectives import Ranks
from tinsmith.actors.engine.formats import publish_adapter, publish_full
from tinsmith.actors.engine.model.fsdp import Scorer, free
from tinsmith.actors.engine.trainable.lora import AdapterBank
from tinsmith.actors.engine.trainable.optimizer import AdamW
from tinsmith.bus.protocol.commands import CreateModelArgs, LoraSpec

Gradients = list[Tensor | None]


class Trainable(ABC):
    """The common part: parameters, their optimizer, and the gradients in between."""

    def __init__(self, args: CreateModelArgs, scorer: Scorer, params: dict[str, nn.Parameter], ranks: Ranks) -> None:
        self.args = args
        self.scorer = scorer
        self.params = params
        self.ranks = ranks
        self.optimizer = self.fresh_optimizer()
        self.pending = 0
        """forward_backward commands since the last step."""
        self.spoilt = False
        """Whether the loss of any of them was not finite, on any rank."""

    @abstractmethod
    def activate(self) -> None:
        """Make the scorer compute this model."""

    @abstractmethod
    def changed(self) -> None:
        """To be called after parameters were written to."""

    @abstractmethod
    def reduce_gradients(self) -> None:
        """Make every `.grad` the sum over ranks (of this rank's shard); a collective, once before a step."""

    @abstractmethod
    def gradient_tensors(self) -> dict[str, Tensor]:
        """The accumulated gradients, whole, such that `put_gradient_tensors` restores every bit; a collective."""

    @abstractmethod
    def put_gradient_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take the accumulated gradients from what `gradient_tensors` gave."""

    @abstractmethod
    def publish(self, path: Path, base: str | Path) -> None:
        """Write the weights in the format that others load; a collective."""

    def close(self) -> None:
        """Let go of what is shared with other models; nothing where nothing is."""
        self.clear_gradients()

    def take_gradients(self) -> Gradients:
        """The gradients so far, leaving none."""
        taken = [param.grad for param in self.params.values()]
        self.clear_gradients()
        return taken

    def add_gradients(self, earlier: Gradients) -> None:
        """Put what was taken back, under what was added since."""
        for param, before in zip(self.params.values(), earlier, strict=True):
            if before is not None:
                param.grad = before if param.grad is None else before.add_(param.grad)

    def clear_gradients(self) -> None:
        """Forget what has accumulated."""
        for param in self.params.values():
            param.grad = None

    def fresh_optimizer(self) -> AdamW:
        """An optimizer that has made no step."""
        return AdamW(self.params, group=self.ranks.group)


class LoraTrainable(Trainable):
    """Adapters: replicated parameters whose gradients stay local until the step."""

    def __init__(self, args: CreateModelArgs, spec: LoraSpec, scorer: Scorer, bank: AdapterBank, ranks: Ranks) -> None:
        self.bank = bank
        self.adapter = bank.add(spec)
        super().__init__(args, scorer, dict(self.adapter.params), ranks)

    def activate(self) -> None:
        self.bank.activate(self.adapter)

    def changed(self) -> None:
        """Nothing is derived from adapters."""

    def reduce_gradients(self) -> None:
        self._set(self.ranks.sum_(self._flat()))

    def gradient_tensors(self) -> dict[str, Tensor]:
        # Each rank's own share: adding the shares now would round otherwise than the step itself does.
        return {str(rank): share for rank, share in enumerate(self.ranks.all_gather(self._flat()))}

    def put_gradient_tensors(self, tensors: dict[str, Tensor]) -> None:
        shares = [tensors[str(rank)] for rank in range(len(tensors))]
        if len(shares) == self.ranks.size:
            mine = shares[self.ranks.rank].clone()
        else:
            mine = torch.stack(shares).sum(0) if self.ranks.rank == 0 else torch.zeros_like(shares[0])
        self._set(mine)

    def publish(self, path: Path, base: str | Path) -> None:
        self.ranks.first(lambda: publish_adapter(path, self.scorer.model, self.adapter, base))

    def close(self) -> None:
        super().close()
        self.bank.remove(self.adapter)

    def _flat(self) -> Tensor:
        parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.params.values()]
        return torch.cat([part.detach().reshape(-1) for part in parts])

    def _set(self, flat: Tensor) -> None:
        params = list(self.params.values())
        for param, part in zip(params, torch.split(flat, [param.numel() for param in params]), strict=True):
            param.grad = part.view_as(param).to(param.device)


class FullTrainable(Trainable):
    """Every parameter of a copy of the base: FSDP sums and shards gradients in each backward pass."""

    def __init__(self, args: CreateModelArgs, scorer: Scorer, ranks: Ranks) -> None:
        params = {name: param for name, param in scorer.model.named_parameters() if param.requires_grad}
        super().__init__(args, scorer, params, ranks)

    def activate(self) -> None:
        """The scorer is this model's own."""

    def changed(self) -> None:
        free(self.scorer)

    def reduce_gradients(self) -> None:
        """FSDP has done so."""

    def gradient_tensors(self) -> dict[str, Tensor]:
        return {n: gather_shards(p.grad) for n, p in self.params.items() if p.grad is not None}

    def put_gradient_tensors(self, tensors: dict[str, Tensor]) -> None:
        for name, whole in tensors.items():
            self.params[name].grad = spread(whole, self.params[name])

    def publish(self, path: Path, base: str | Path) -> None:
        weights: dict[str, Tensor] = {}
        for name, param in self.params.items():
            whole = gather_shards(param.detach())
            if self.ranks.rank == 0:
                weights[name] = whole.cpu()
        self.ranks.first(lambda: publish_full(path, self.scorer.model, weights, base))


def gather_shards(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, on every rank (a collective); a plain tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread(whole: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, which every rank has, laid out like another one, in memory of its own; no exchange."""
    moved = whole.to(like.device, like.dtype, copy=True)
    if not isinstance(like, DTensor):
        return moved
    cut = distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)
    assert isinstance(cut, DTensor)
    return DTensor.from_local(
        cut.to_local().clone(),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def write_into(param: Tensor, whole: Tensor) -> None:
    """Set a parameter's values from a whole tensor that every rank has."""
    new = spread(whole, param)
    target = param.detach()
    if isinstance(target, DTensor) and isinstance(new, DTensor):
        target.to_local().copy_(new.to_local())
    else:
        target.copy_(new)

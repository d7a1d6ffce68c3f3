"""A model in training as tensors and back: what a checkpoint of it holds, and what one must be to fit it.

Writing is a collective that gathers whole tensors on rank 0; when reading, every rank has them.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from tinsmith.actors.engine import checkpoint
from tinsmith.actors.engine.collectives import Ranks
from tinsmith.actors.engine.model.base import ModelInfo
from tinsmith.actors.engine.trainable.trainable import Trainable, gather_shards, write_into
from tinsmith.bus.protocol.commands import CreateModelArgs
from tinsmith.bus.protocol.errors import InvalidInput


def write_state(
    it: Trainable, base: ModelInfo, ranks: Ranks, path: Path, user: dict[str, Any], *, gradients: bool
) -> None:
    """Write weights, optimizer, `user`, and with `gradients` what has accumulated. Raises DiskFull on all ranks."""
    groups: dict[str, dict[str, Tensor]] = {
        "param": {name: param.detach() for name, param in it.params.items()},
        "optimizer": it.optimizer.state_dict(),
        "grad": it.gradient_tensors() if gradients and it.pending else {},
    }
    tensors: dict[str, Tensor] = {}
    for group, members in groups.items():
        for name, member in members.items():
            whole = gather_shards(member)
            if ranks.rank == 0:
                tensors[f"{group}/{name}"] = whole.cpu()
    meta = {
        "args": it.args.model_dump(),
        "base": asdict(base),
        "pending": it.pending if gradients else 0,
        "spoilt": it.spoilt and gradients,
        "user": user,
    }
    ranks.first(lambda: checkpoint.write(path, tensors, meta))


def read_state(it: Trainable, args: CreateModelArgs, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and meta of a checkpoint that fits a model made with `args`.

    Raises UnknownVersion, DamagedCheckpoint, InvalidInput (of another kind or shape).
    """
    tensors, meta = checkpoint.read(path)
    saved = CreateModelArgs.model_validate(meta["args"])
    if (saved.base, saved.lora and _shape(saved)) != (args.base, args.lora and _shape(args)):
        raise InvalidInput(
            f"the checkpoint is of base {saved.base!r} with lora {saved.lora}, the model of {args.base!r} with "
            f"lora {args.lora}",
            remedy="Load it into a model that was created with the same base and lora arguments.",
            field="checkpoint",
        )
    shapes = {name: tuple(t.shape) for name, t in _under(tensors, "param").items()}
    if shapes != {name: tuple(p.shape) for name, p in it.params.items()}:
        raise InvalidInput("the checkpoint's parameters are not this model's", field="checkpoint")
    return tensors, meta


def put_state(it: Trainable, tensors: dict[str, Tensor], *, optimizer: bool) -> None:
    """Take over weights, and the optimizer's state or a fresh one; accumulated gradients are dropped."""
    fresh = it.fresh_optimizer()
    if optimizer:
        fresh.load_state_dict(_under(tensors, "optimizer"))
    for name, whole in _under(tensors, "param").items():
        write_into(it.params[name], whole)
    it.optimizer = fresh
    it.changed()
    it.clear_gradients()
    it.pending, it.spoilt = 0, False


def put_gradients(it: Trainable, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Take over what had accumulated when a snapshot was written."""
    it.pending, it.spoilt = int(meta["pending"]), bool(meta.get("spoilt", False))
    if it.pending:
        it.put_gradient_tensors(_under(tensors, "grad"))


def _shape(args: CreateModelArgs) -> dict[str, Any]:
    """What of the LoRA arguments a checkpoint must share: all but the seed, which only chose the first weights."""
    return args.lora.model_dump(exclude={"seed"}) | {"alpha": args.lora.scale} if args.lora is not None else {}


def _under(tensors: dict[str, Tensor], group: str) -> dict[str, Tensor]:
    return {key.partition("/")[2]: value for key, value in tensors.items() if key.partition("/")[0] == group}

"""One long-lived rank of a test: joins the others once, then carries out one list of orders after another."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tinsmith.actors.engine.engine import Engine
from tinsmith.actors.engine.losses.registry import Config, Loss, LossOutput, LossRegistry, TokenInputs, keep
from tinsmith.actors.engine.trainable.trainable import gather_shards, write_into
from tinsmith.actors.schedule.planner import Plan
from tinsmith.actors.workers.step import RankReply
from tinsmith.bus.protocol.commands import parse_args
from tinsmith.bus.protocol.datum import unpack_datums
from tinsmith.bus.protocol.envelope import Kind
from tinsmith.bus.protocol.errors import TinsmithError

ALIAS = "tiny"


@dataclass(frozen=True)
class Order:
    """What every rank is told: a command as the service sends it, or a look at (a write to) a model's tensors.

    work: the value of a Kind, or weights, gradients, optimizer, write.
    """

    work: str
    model: str
    args: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""
    plan: Plan | None = None
    tensors: dict[str, np.ndarray] = field(default_factory=dict)


def serve(pipe: Connection, rank: int, world: int, port: int) -> None:
    """Answer (path of a base, orders) with (True, replies) or (False, traceback) until None comes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    engines: dict[Path, Engine] = {}
    while (message := pipe.recv()) is not None:
        try:
            pipe.send((True, _case(engines, mesh, *message)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


def _case(engines: dict[Path, Engine], mesh: DeviceMesh, path: Path, orders: list[Order]) -> list[RankReply]:
    if path not in engines:
        losses = LossRegistry.builtin()
        losses.register(Loss("levelled", levelled, required=("advantages", "level")))
        engines[path] = Engine(path, alias=ALIAS, mesh=mesh, losses=losses)
    engine = engines[path]
    try:
        return [_carry_out(engine, order) for order in orders]
    finally:
        for model in engine.models():
            engine.unload(model)


def levelled(tokens: TokenInputs, config: Config) -> LossOutput:
    """A loss with a term that no weight moves: NaN where the level is below 0, and its gradient finite all the same."""
    gain = keep(tokens.mask, tokens.logprobs) * tokens.inputs["advantages"]
    return LossOutput(torch.log(keep(tokens.mask, tokens.inputs["level"]) + ~tokens.mask) - gain, tokens.mask, {})


def _carry_out(engine: Engine, order: Order) -> RankReply:
    try:
        if order.work in {kind.value for kind in Kind}:
            return _command(engine, order, Kind(order.work))
        return RankReply(result={"tensors": _look(engine, order)})
    except TinsmithError as error:
        return RankReply(error=error.to_wire())


def _command(engine: Engine, order: Order, kind: Kind) -> RankReply:
    args = parse_args(kind, order.args)
    if kind in (Kind.FORWARD, Kind.FORWARD_BACKWARD):
        assert order.plan is not None
        data = unpack_datums(order.body)
        done = engine.forward(order.model, data, order.plan, args, backward=kind is Kind.FORWARD_BACKWARD)
        return RankReply(indices=done.indices, columns=done.columns, logprobs=tuple(done.logprobs))
    if kind is Kind.OPTIM_STEP:
        return RankReply(scalars=engine.optim_step(order.model, args))
    if kind is Kind.CREATE_MODEL:
        return RankReply(result=engine.create(order.model, args))
    assert kind is Kind.UNLOAD
    engine.unload(order.model)
    return RankReply()


def _look(engine: Engine, order: Order) -> dict[str, np.ndarray]:
    model = engine._models[order.model]
    if order.work == "write":
        for name, values in order.tensors.items():
            write_into(model.params[name], torch.from_numpy(values))
        model.changed()
        return {}
    if order.work == "optimizer":
        return {name: gather_shards(tensor).numpy().copy() for name, tensor in model.optimizer.state_dict().items()}
    if order.work == "weights":
        return {name: gather_shards(param.detach()).numpy().copy() for name, param in model.params.items()}
    assert order.work == "gradients"
    return {name: _whole_gradient(engine, param).numpy() for name, param in model.params.items()}


def _whole_gradient(engine: Engine, param: torch.Tensor) -> torch.Tensor:
    """The gradient summed over ranks, which stays as it is in the model."""
    if isinstance(param, DTensor):
        return torch.zeros(param.shape) if param.grad is None else gather_shards(param.grad).clone()
    mine = torch.zeros_like(param) if param.grad is None else param.grad
    return engine.ranks.sum_(mine.detach().clone())

"""One rank of the sharded optimizer test, run in a process of its own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from losses.optimizer_cases import STEPS, values
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tinsmith.actors.engine.trainable.optimizer import AdamW
from tinsmith.bus.protocol.commands import OptimStepArgs
from tinsmith.bus.protocol.errors import NonFinite


def sharded(tensors, mesh, placements):
    return {
        name: tensor if name == "plain" else distribute_tensor(tensor, mesh, placements, src_data_rank=None)
        for name, tensor in tensors.items()
    }


def full(tensors):
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for name, t in tensors.items()}


def train(mesh, placements, group):
    parameters = {name: p.requires_grad_() for name, p in sharded(values(0), mesh, placements).items()}
    optimizer = AdamW(parameters, group=group)

    def feed(gradients):
        for name, gradient in sharded(gradients, mesh, placements).items():
            parameters[name].grad = gradient

    columns = []
    for number, args in enumerate(STEPS):
        feed(values(number + 1))
        columns.append(optimizer.step(args))
    with torch.no_grad():
        seen = {"columns": columns, "parameters": full(parameters), "state": full(optimizer.state_dict())}
    # NaN in an element that one rank alone holds.
    broken = values(9)
    broken["uneven"][-1, -1] = torch.nan
    feed(broken)
    try:
        optimizer.step(OptimStepArgs(lr=1.0))
    except NonFinite as error:
        seen["refusal"] = error.message
    skip = optimizer.step(OptimStepArgs(lr=1.0, on_non_finite="skip"))
    with torch.no_grad():
        seen["skip"], seen["after"] = skip, full(parameters)
        # State as DTensors and as full tensors, into optimizers made anew.
        again = []
        for state in (optimizer.state_dict(), full(optimizer.state_dict())):
            other = AdamW({name: p.detach().clone().requires_grad_() for name, p in parameters.items()}, group=group)
            other.load_state_dict(state)
            again.append(full(other.state_dict()))
        seen["again"], seen["final_state"] = again, full(optimizer.state_dict())
    return seen


def main(rank: int, store: str, out: str) -> None:
    """Join two others as this rank; write what it saw with torch.save."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    seen = {}
    pair = dist.new_group([0, 1])
    three = DeviceMesh("cpu", list(range(3)))
    two = DeviceMesh("cpu", [0, 1])
    copies = DeviceMesh("cpu", [[0], [1]])
    seen["3 ranks"] = train(three, [Shard(0)], dist.group.WORLD)
    if rank < 2:
        seen["2 ranks"] = train(two, [Shard(0)], pair)
        seen["2 copies"] = train(copies, [Replicate(), Shard(0)], pair)
        seen["2 replicas"] = train(two, [Replicate()], pair)
    torch.save(seen, out)
    dist.barrier()
    dist.destroy_process_group()

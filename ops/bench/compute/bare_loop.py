"""One rank of a bare FSDP2 training loop: transformers, peft and torch alone. The reference for `training_step`.

Started as `python -m tinsmith.ops.bench.compute.bare_loop MODEL ADAPTER RANK PORT`. Each line `PACKING STEPS` on
stdin runs so many steps; the answer is one line of JSON: seconds, and the loss and gradient norm of each step.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from peft import PeftModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tinsmith.actors.engine.batch import MicroBatch, collate
from tinsmith.actors.schedule.planner import plan_batch
from tinsmith.ops.bench.workload import LR, TOKEN_BUDGET, WORLD, training_data

Packing = Literal["same", "gathered", "arrival"]
"""The micro-batches of the service's planner, those with the base's weights gathered once and kept, or each rank's
share of the batch in order of arrival."""


class Loop:
    """The sharded model and its optimizer."""

    def __init__(self, model: str, adapter: str) -> None:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
        self.model: Any = PeftModel.from_pretrained(base, adapter, is_trainable=True)
        self.params = [param for param in self.model.parameters() if param.requires_grad]
        mesh = init_device_mesh("cpu", (WORLD,))
        # Adapters stay whole on each rank: the fewest collectives a step that FSDP2 allows here.
        whole = set(self.params)
        for layer in base.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=False, ignored_params=whole)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=False, ignored_params=whole)
        self.units = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        self.optimizer = torch.optim.AdamW(self.params, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)

    def keep_gathered(self, keep: bool) -> None:
        """Whether the base's weights stay gathered after a backward pass."""
        for unit in self.units:
            unit.set_reshard_after_backward(not keep, recurse=False)
            if not keep:
                unit.reshard()

    def step(self, batches: Sequence[MicroBatch]) -> tuple[float, float]:
        """One step; the loss summed over tokens and ranks, and the global gradient norm."""
        total = torch.zeros(())
        for batch in batches:
            logits = self.model(input_ids=batch.tokens, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits[batch.mask], batch.targets[batch.mask], reduction="sum")
            torch.autograd.backward(loss)
            total += loss.detach()
        grads = [cast(torch.Tensor, param.grad) for param in self.params]
        flat = torch.cat([*(grad.view(-1) for grad in grads), total.view(1)])
        dist.all_reduce(flat)
        for grad, summed in zip(grads, torch.split(flat, [*(grad.numel() for grad in grads), 1]), strict=False):
            grad.copy_(summed.view_as(grad))
        norm = torch.nn.utils.clip_grad_norm_(self.params, math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(flat[-1]), float(norm)


def _batches(packing: Packing, rank: int) -> list[MicroBatch]:
    data = training_data()
    if packing != "arrival":
        plan = plan_batch([len(datum) for datum in data], WORLD, TOKEN_BUDGET)
        return [collate(data, indices) for indices in plan.ranks[rank]]
    share = len(data) // WORLD
    return [collate(data, range(rank * share, (rank + 1) * share))]


def main(model: str, adapter: str, rank: int, port: int) -> None:
    """Serve stdin until it closes."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    loop = Loop(model, adapter)
    batches: dict[str, list[MicroBatch]] = {packing: _batches(packing, rank) for packing in get_args(Packing)}
    print("ready", flush=True)
    for line in sys.stdin:
        packing, steps = line.split()
        loop.keep_gathered(packing == "gathered")
        begun = time.perf_counter()
        done = [loop.step(batches[packing]) for _ in range(int(steps))]
        seconds = time.perf_counter() - begun
        answer = {"seconds": seconds, "losses": [loss for loss, _ in done], "norms": [norm for _, norm in done]}
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

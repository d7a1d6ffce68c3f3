"""What the planner saves: useful tokens among the computed ones, and speed beside micro-batches in order of arrival."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tinsmith.actors.engine.engine import Engine
from tinsmith.actors.schedule.planner import Plan
from tinsmith.bus.protocol.commands import CreateModelArgs, ForwardArgs, LoraSpec
from tinsmith.bus.protocol.datum import Datum
from tinsmith.bus.protocol.errors import TinsmithError
from tinsmith.ops.bench.random_llama import make_data
from tinsmith.ops.bench.row import Row, faster_by, seconds_of
from tinsmith.ops.bench.stage import Stage
from tinsmith.ops.bench.workload import TOKEN_BUDGET

DATUMS, SHORTEST, LONGEST = 256, 16, 512
VOCAB = 256
ROUNDS = 3


async def packing(stage: Stage) -> list[Row]:
    """256 datums of log-normal lengths on one rank, planned and in order of arrival, in turns."""
    await stage.clear()
    torch.set_num_threads(1)
    path = stage.llama("two-layers", vocab=VOCAB, hidden=64, layers=2, context=LONGEST)
    lengths = np.exp(np.random.default_rng(3).normal(np.log(96), 0.9, DATUMS)).astype(int).clip(SHORTEST, LONGEST)
    data = make_data(lengths, VOCAB)
    engine = Engine(path, alias="two", token_budget=TOKEN_BUDGET)
    engine.create("m", CreateModelArgs(base="two", lora=LoraSpec(rank=8)))
    plans = {"planned": engine.plan(data), "arrival": arrival_plan(lengths.tolist(), TOKEN_BUDGET)}
    losses = {name: _loss(engine, data, plan) for name, plan in plans.items()}
    if not np.isclose(losses["planned"], losses["arrival"], rtol=1e-5):
        raise TinsmithError(f"the loss depends on the packing: {losses}")
    speeds: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(ROUNDS):
        for name, plan in plans.items():
            took = seconds_of(lambda plan=plan: _loss(engine, data, plan))  # type: ignore[misc]
            speeds[name].append(plan.tokens / took)
    planned, arrival = plans["planned"], plans["arrival"]
    share, reference = (plan.tokens / plan.computed_tokens for plan in (planned, arrival))
    note = f"{planned.micro_batches} micro-batches beside {arrival.micro_batches} in order of arrival"
    return [
        Row("packing: useful", share, "of 1", reference, share / reference, ">= 0.9", share >= 0.9, note),
        faster_by("packing: speed", speeds["planned"], speeds["arrival"], 1.5, "tokens/s", "forward_backward, 1 rank"),
    ]


def arrival_plan(lengths: Sequence[int], token_budget: int) -> Plan:
    """One rank's micro-batches filled in order of arrival, each padded to its longest within the budget."""
    batches: list[list[int]] = []
    computed = longest = 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if not batches or (len(batches[-1]) + 1) * longest > token_budget:
            batches.append([])
            longest = length
        batches[-1].append(index)
    for batch in batches:
        computed += len(batch) * max(lengths[index] for index in batch)
    return Plan((tuple(tuple(batch) for batch in batches),), computed, sum(lengths))


def _loss(engine: Engine, data: list[Datum], plan: Plan) -> float:
    result = engine.forward("m", data, plan, ForwardArgs(loss="cross_entropy"), backward=True)
    return float(result.columns["loss"].sum())

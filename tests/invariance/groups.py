"""Groups of real gloo ranks that live as long as the tests: a case costs its commands, not a process start."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
from invariance.worker import ALIAS, Order, serve

from tinsmith.actors.metrics import Catalogue
from tinsmith.actors.schedule.planner import plan_batch
from tinsmith.actors.training.outcome import reduce_replies
from tinsmith.actors.workers.step import RankReply
from tinsmith.bus.protocol.codec import decode, unpack_ragged
from tinsmith.bus.protocol.datum import Datum, pack_datums
from tinsmith.bus.protocol.envelope import Kind
from tinsmith.bus.protocol.errors import TinsmithError

BATCH = (Kind.FORWARD.value, Kind.FORWARD_BACKWARD.value)
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "transformers", "peft", "tinsmith.actors.engine.engine", "gloo_ranks"])


@dataclass(frozen=True)
class Call:
    """One command, or a look at (a write to) a model: see worker.Order. `budget`: padded tokens a micro-batch."""

    work: str
    model: str = "m"
    args: dict[str, Any] = field(default_factory=dict)
    data: Sequence[Datum] = ()
    budget: int = 64
    tensors: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What a call led to, put together from all ranks as the service does it."""

    metrics: dict[str, float] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    error: TinsmithError | None = None
    logprobs: list[np.ndarray] = field(default_factory=list)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    datums_of_ranks: tuple[int, ...] = ()


def create(model: str = "m", lora: dict[str, Any] | None = None) -> Call:
    """A model with adapters, or (None) full fine-tuning."""
    return Call("create_model", model, {"base": ALIAS, "lora": lora})


def forward_backward(
    data: Sequence[Datum], loss: str, config: dict[str, Any] | None = None, *, model: str = "m", budget: int = 64
) -> Call:
    return Call("forward_backward", model, {"loss": loss, "config": config or {}}, data, budget)


def forward(
    data: Sequence[Datum], loss: str, config: dict[str, Any] | None = None, *, model: str = "m", budget: int = 64
) -> Call:
    return Call("forward", model, {"loss": loss, "config": config or {}}, data, budget)


def step(model: str = "m", **args: Any) -> Call:
    return Call("optim_step", model, args)


class RankGroup:
    """`world` ranks in processes of their own, started on first use, and again after one has failed or hung."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.catalogue = Catalogue.load()
        self._children: list[Any] = []
        self._pipes: list[Any] = []

    def run(self, base: Path, calls: Sequence[Call], *, timeout: float = 60.0) -> list[Answer]:
        """The answers; the engine is empty before and after. Raises AssertionError with a failed rank's traceback."""
        if not self._children:
            self._start()
        orders = [self._order(call) for call in calls]
        for pipe in self._pipes:
            pipe.send((base, orders))
        replies = self._collect(timeout)
        together = zip(calls, orders, zip(*replies, strict=True), strict=True)
        return [self._answer(call, order, each) for call, order, each in together]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                continue  # this one has ended already
        for child in self._children:
            child.join(5)
            child.kill()
            child.join()
        self._children, self._pipes = [], []

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.world):
            here, there = _CONTEXT.Pipe()
            child = _CONTEXT.Process(target=serve, args=(there, rank, self.world, port), daemon=True)
            child.start()
            there.close()
            self._children.append(child)
            self._pipes.append(here)

    def _collect(self, timeout: float) -> list[list[RankReply]]:
        replies: dict[int, list[RankReply]] = {}
        while len(replies) < self.world:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in replies}
            ready = wait(list(waiting), timeout)
            failure = "" if ready else f"ranks {sorted(waiting.values())} gave no answer within {timeout} s"
            for pipe in ready:
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, "the process ended"
                if ok:
                    replies[waiting[pipe]] = value
                else:
                    failure = f"rank {waiting[pipe]} failed:\n{value}"
            if failure:
                for child in self._children:
                    child.kill()
                self.close()
                raise AssertionError(failure)
        return [replies[rank] for rank in range(self.world)]

    def _order(self, call: Call) -> Order:
        if call.work not in BATCH:
            return Order(call.work, call.model, call.args, tensors=call.tensors)
        body, lengths = pack_datums(call.data)
        return Order(call.work, call.model, call.args, body, plan_batch(lengths, self.world, call.budget))

    def _answer(self, call: Call, order: Order, replies: tuple[RankReply, ...]) -> Answer:
        first = replies[0]
        if call.work not in {kind.value for kind in Kind}:
            assert first.error is None, first.error
            for reply in replies[1:]:
                for name, tensor in first.result["tensors"].items():
                    np.testing.assert_array_equal(reply.result["tensors"][name], tensor, err_msg=f"ranks: {name}")
            return Answer(tensors=first.result["tensors"])
        for reply in replies[1:]:
            assert repr(reply.scalars) == repr(first.scalars)  # NaN equals itself
        outcome = reduce_replies(Kind(call.work), replies, order.plan, self.catalogue)
        logprobs = unpack_ragged(decode(outcome.body)["logprobs"]) if outcome.body else []
        shares = tuple(0 if reply.indices is None else len(reply.indices) for reply in replies)
        return Answer(outcome.metrics, outcome.flags, outcome.error, logprobs, {}, shares)

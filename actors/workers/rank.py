"""One rank of a sharded trainer: a sync, single-threaded Ray actor that executes one step at a time.

Each rank decodes and checks the whole batch itself, so that a refusal is the same decision everywhere. A TinsmithError
is a fact like any other: it consumes the command's place in the order. Any other exception leaves the ranks possibly
out of step, so it is let out, and the coordinator rebuilds the group.
"""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tinsmith.actors.service.options import ServiceOptions
from tinsmith.actors.workers.position import Position
from tinsmith.actors.workers.step import RankReply, Step
from tinsmith.bus.protocol.commands import CreateModelArgs, parse_args
from tinsmith.bus.protocol.datum import unpack_datums
from tinsmith.bus.protocol.envelope import Kind
from tinsmith.bus.protocol.errors import InvalidInput, TinsmithError, UnknownModel, UnknownVersion, VersionExists

if TYPE_CHECKING:
    from tinsmith.actors.engine.engine import Engine

Body = bytes | npt.NDArray[np.uint8]


class TrainerRank:
    """Rank `rank` of `world`. Torch is imported in `join`, once the settings that it reads at import are in place."""

    def __init__(self, options: ServiceOptions, rank: int, world: int) -> None:
        self._options = options
        self._rank = rank
        self._world = world
        self._engine: Engine | None = None
        self._positions: dict[str, Position] = {}

    def address(self) -> tuple[str, int]:
        """Where the ranks may meet: this node's address and a free port (asked of rank 0)."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, int(probe.getsockname()[1])

    def join(self, host: str, port: int, one_node: bool) -> dict[str, Any]:
        """Meet the other ranks at (host, port), load and shard the base; returns facts about it (JSON-able)."""
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if one_node:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        from datetime import timedelta

        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        from tinsmith.actors.engine.engine import Engine
        from tinsmith.actors.engine.losses.registry import load_losses

        torch.set_num_threads(1)
        cuda = torch.cuda.is_available()
        mesh = None
        if self._world > 1:
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                init_method=f"tcp://{host}:{port}",
                rank=self._rank,
                world_size=self._world,
                timeout=timedelta(seconds=self._options.step_deadline),
            )
            mesh = init_device_mesh("cuda" if cuda else "cpu", (self._world,))
        self._engine = Engine(
            self._options.model_path,
            alias=self._options.alias,
            mesh=mesh,
            device="cuda" if cuda else "cpu",
            losses=load_losses(*self._options.losses),
            gradient_checkpointing=self._options.gradient_checkpointing,
            keep_gathered=self._options.keep_gathered_mib << 20,
        )
        return self._facts(self._engine)

    def describe(self) -> dict[str, Any] | None:
        """As `join` returned; None when this rank has not joined."""
        return self._facts(self._engine) if self._engine is not None else None

    def _facts(self, engine: Engine) -> dict[str, Any]:
        base = engine.base
        return {
            "context": base.context,
            "vocab_size": base.vocab_size,
            "parameters": base.parameters,
            "architecture": base.architecture,
            "device": str(engine.device),
            "pid": os.getpid(),
        }

    def positions(self) -> dict[str, tuple[str, int, int]]:
        """Model -> (incarnation, epoch, applied seq) of every model held."""
        return {model: (at.incarnation, at.epoch, at.applied) for model, at in self._positions.items()}

    def execute(self, packed: bytes, body: Body = b"") -> bytes:
        """Do the pickled Step, or return the pickled RankReply of before; see Position for what is refused."""
        step: Step = pickle.loads(packed)
        return pickle.dumps(self._execute(step, body), pickle.HIGHEST_PROTOCOL)

    def _execute(self, step: Step, body: Body) -> RankReply:
        begun = time.perf_counter()
        try:
            reply = self._once(step, step.work, body) if isinstance(step.work, Kind) else self._keep_house(step)
        except TinsmithError as error:
            # Nothing was recorded: the sender is not (or no longer) entitled to this step.
            reply = RankReply(error=error.at(model=step.model, command=step.command or None).to_wire())
        return replace(reply, seconds=time.perf_counter() - begun)

    def _once(self, step: Step, kind: Kind, body: Body) -> RankReply:
        position = self._positions.get(step.model)
        if position is None:
            if kind is not Kind.CREATE_MODEL:
                raise UnknownModel("this trainer does not hold the model", remedy="Create it first.", model=step.model)
            position = Position(step.incarnation, step.epoch, applied=step.after)
        stored = position.judge(step)
        if stored is not None:
            return stored
        try:
            reply = self._run(step, kind, body)
        except TinsmithError as error:
            reply = RankReply(error=error.at(model=step.model, command=step.command).to_wire())
        position.record(step, reply)
        if kind is Kind.UNLOAD and reply.error is None:
            self._positions.pop(step.model, None)
        elif kind is not Kind.CREATE_MODEL or reply.error is None:
            self._positions[step.model] = position
        return reply

    def _run(self, step: Step, kind: Kind, body: Body) -> RankReply:
        if step.refusal is not None:
            return RankReply(error=step.refusal)
        engine = self._held()
        args = parse_args(kind, step.args)
        model = step.model
        if kind in (Kind.FORWARD, Kind.FORWARD_BACKWARD):
            if step.plan is None:
                raise InvalidInput("the batch is empty", remedy="Send at least one datum.", model=model)
            data = unpack_datums(body)
            lengths = [len(datum.tokens) for datum in data]
            if sum(lengths) != step.plan.tokens or len(data) != step.plan.datums:
                raise InvalidInput(
                    "the lengths in the header are not those of the body",
                    remedy="Send one length for each datum.",
                    field="lengths",
                )
            done = engine.forward(model, data, step.plan, args, backward=kind is Kind.FORWARD_BACKWARD)
            return RankReply(indices=done.indices, columns=done.columns, logprobs=tuple(done.logprobs))
        if kind is Kind.OPTIM_STEP:
            return RankReply(scalars=engine.optim_step(model, args))
        if kind is Kind.CREATE_MODEL:
            return RankReply(result=self._create(engine, model, args))
        if kind is Kind.SAVE:
            place = f"{model}/{args.name}"
            path = self._options.checkpoint_dir(place)
            if not args.overwrite:
                self._refuse_existing(path, place, "Use another name, or overwrite.")
            engine.save(model, path, {"seq": step.seq})
            return RankReply(result={"checkpoint": place, "path": str(path)})
        if kind is Kind.LOAD:
            path = self._options.checkpoint_dir(args.checkpoint)
            self._require(path, args.checkpoint)
            engine.load(model, path, optimizer=args.optimizer)
            return RankReply(result={"checkpoint": args.checkpoint})
        if kind is Kind.PUBLISH:
            place = f"{model}/{args.name}"
            path = self._options.version_dir(place)
            self._refuse_existing(path, place, "Versions are immutable; use another name.")
            engine.publish(model, path)
            return RankReply(result={"version": place, "path": str(path)})
        if kind is Kind.UNLOAD:
            engine.unload(model)
            return RankReply()
        return RankReply(result=engine.info(model))

    def _create(self, engine: Engine, model: str, args: CreateModelArgs) -> dict[str, Any]:
        """A new model, begun from a checkpoint where one is named; nothing is left of it when that can't be loaded."""
        if args.checkpoint is None:
            return engine.create(model, args)
        path = self._options.checkpoint_dir(args.checkpoint)
        self._require(path, args.checkpoint)
        engine.create(model, args.model_copy(update={"checkpoint": None, "optimizer": False}))
        try:
            engine.load(model, path, optimizer=args.optimizer)
        except TinsmithError:
            engine.unload(model)
            raise
        return {**engine.info(model), "checkpoint": args.checkpoint}

    def _keep_house(self, step: Step) -> RankReply:
        engine = self._held()
        if step.work == "snapshot":
            position = self._positions.get(step.model)
            if position is None:
                raise UnknownModel("there is nothing to snapshot", model=step.model)
            engine.snapshot(step.model, step.path, {"seq": position.applied})
            return RankReply(result={"seq": position.applied})
        if step.work == "restore":
            meta = engine.restore(step.model, step.path)
            self._positions[step.model] = Position(step.incarnation, step.epoch, int(meta["seq"]))
            return RankReply(result={"seq": int(meta["seq"])})
        if step.model in self._positions:
            engine.unload(step.model)
            del self._positions[step.model]
        if step.path and self._rank == 0:
            shutil.rmtree(step.path, ignore_errors=True)
        return RankReply()

    def _refuse_existing(self, path: Path, name: str, remedy: str) -> None:
        """All ranks look before any writes: rank 0 alone sees the folder first."""
        exists = self._held().ranks.first(path.exists)
        if exists:
            raise VersionExists(f"{name!r} exists", remedy=remedy, field="name")

    def _require(self, path: Path, name: str) -> None:
        if not self._held().ranks.first(path.is_dir):
            raise UnknownVersion(
                f"there is no checkpoint {name!r}",
                remedy="Name one that save returned, as model/name.",
                field="checkpoint",
            )

    def _held(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the rank has not joined its group")
        return self._engine

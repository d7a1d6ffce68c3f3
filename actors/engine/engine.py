"""The engine: what one rank of a trainer does with each command.

Every method is called with the same arguments and in the same order on all ranks, and either returns on all of them or
raises the same error on all of them. What is refused has changed nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tinsmith.actors.engine import checkpoint
from tinsmith.actors.engine.batch import MicroBatch, collate, validate_batch
from tinsmith.actors.engine.collectives import Ranks
from tinsmith.actors.engine.losses.registry import Config, Evaluation, Loss, LossRegistry, TokenInputs, evaluate
from tinsmith.actors.engine.model.base import BaseModel, load_base
from tinsmith.actors.engine.model.fsdp import Reshard, Scorer, checkpoint_layers, shard
from tinsmith.actors.engine.trainable.lora import AdapterBank
from tinsmith.actors.engine.trainable.state import put_gradients, put_state, read_state, write_state
from tinsmith.actors.engine.trainable.trainable import FullTrainable, LoraTrainable, Trainable
from tinsmith.actors.schedule.planner import Plan, plan_batch
from tinsmith.bus.protocol.commands import CreateModelArgs, ForwardArgs, OptimStepArgs
from tinsmith.bus.protocol.datum import Datum
from tinsmith.bus.protocol.errors import InvalidInput, ModelExists, NoGradients, TinsmithError, UnknownModel


@dataclass(frozen=True)
class ForwardResult:
    """This rank's share of a forward or forward_backward.

    indices int64 [local datums]: places in the batch; columns: name -> float64 [local datums];
    logprobs: float32 [n] or [n, K] for each local datum.
    """

    indices: npt.NDArray[np.int64]
    columns: dict[str, npt.NDArray[np.float64]]
    logprobs: list[npt.NDArray[np.float32]]


class Engine:
    """One base model, sharded over the ranks of a mesh, and the models that train on it.

    mesh None is one rank alone, unsharded. `reshard` says when gathered weights are freed; those of a frozen base of at
    most `keep_gathered` bytes never are. Raises NotAModel or UnsupportedModel.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        alias: str = "",
        mesh: DeviceMesh | None = None,
        device: torch.device | str = "cpu",
        losses: LossRegistry | None = None,
        token_budget: int = 4096,
        dtype: torch.dtype = torch.float32,
        gradient_checkpointing: bool = False,
        reshard: Reshard = "after_backward",
        keep_gathered: int = 0,
    ) -> None:
        self.path = Path(model_path)
        self.device = torch.device(device)
        self.losses = losses if losses is not None else LossRegistry.builtin()
        self.ranks = Ranks(mesh, self.device)
        self.token_budget = token_budget
        self._alias = alias
        self._dtype = dtype
        self._recompute = gradient_checkpointing
        self._reshard: Reshard = reshard
        base = self._load(dtype)
        self.base = base.info
        small = sum(parameter.nbytes for parameter in base.module.parameters()) <= keep_gathered
        self._scorer = self._shard(base, "never" if small else reshard)
        self._bank = AdapterBank(self._scorer.model)
        self._models: dict[str, Trainable] = {}

    def create(self, model: str, args: CreateModelArgs) -> dict[str, Any]:
        """A new model, as `info` describes it. Raises ModelExists, InvalidInput (another base), UnsupportedModel."""
        if model in self._models:
            raise ModelExists("the name is taken", remedy="Unload it first or use another name.", model=model)
        if args.base != self.base.name:
            raise InvalidInput(
                f"this trainer holds {self.base.name!r}, not {args.base!r}",
                remedy=f"Use base = {self.base.name!r}.",
                model=model,
                field="base",
            )
        try:
            self._models[model] = self._make(args)
        except TinsmithError as error:
            raise error.at(model=model) from None
        return self.info(model)

    def info(self, model: str) -> dict[str, Any]:
        """What the model is and where it stands: JSON-able."""
        it = self._get(model)
        return {
            "model": model,
            "base": asdict(self.base),
            "lora": it.args.lora.model_dump() if it.args.lora is not None else None,
            "metadata": dict(it.args.metadata),
            "trainable_parameters": sum(p.numel() for p in it.params.values()),
            "step": it.optimizer.steps,
            "pending": it.pending,
        }

    def plan(self, data: list[Datum]) -> Plan:
        """How a batch is dealt over these ranks under `token_budget` padded tokens a micro-batch."""
        return plan_batch([len(datum) for datum in data], self.ranks.size, self.token_budget)

    def models(self) -> list[str]:
        """Names of the models held, in order of creation."""
        return list(self._models)

    def forward(self, model: str, data: list[Datum], plan: Plan, args: ForwardArgs, *, backward: bool) -> ForwardResult:
        """Log-probs and datum columns of this rank's datums; with `backward`, gradients are added to the model's.

        Raises UnknownModel, UnknownLoss, InvalidLossConfig, InvalidDatum, SequenceTooLong, InvalidInput before anything
        runs; CommandFailed when a registered loss fails, which leaves the gradients as they were.
        """
        it = self._get(model)
        loss = self.losses.get(args.loss)
        config = loss.parse_config(args.config)
        validate_batch(data, loss, vocab_size=self.base.vocab_size, context=self.base.context, config=config)
        if len(plan.ranks) != self.ranks.size:
            raise InvalidInput(f"the plan is for {len(plan.ranks)} ranks, not {self.ranks.size}", model=model)
        it.activate()
        earlier = it.take_gradients() if backward else []
        failure: Exception | None = None
        done: list[tuple[MicroBatch, Evaluation | None, Tensor]] = []
        with torch.set_grad_enabled(backward):
            for indices in plan.ranks[self.ranks.rank]:
                batch = collate(data, indices, self.device, ignored=loss.ignored)
                logprobs, entropy = it.scorer(batch.tokens, batch.targets, batch.mask)
                result: Evaluation | None = None
                try:
                    result = self._evaluate(loss, batch, logprobs, entropy, config)
                except Exception as error:
                    failure = failure or error
                if backward:
                    # A failed loss still walks the graph with zeros: the other ranks wait in its collectives.
                    (result.total if result is not None else (logprobs * 0.0).sum()).backward()
                done.append((batch, result, logprobs.detach()))
        # The gradient of a loss that is not finite can be finite all the same, where no weight moves what is not.
        spoilt = any(result is not None and not result.columns["loss"].isfinite().all() for _, result, _ in done)
        try:
            spoilt = self.ranks.agree(failure, spoilt)
        except TinsmithError as error:
            if backward:
                it.clear_gradients()
                it.add_gradients(earlier)
            raise error.at(model=model) from failure
        if backward:
            it.add_gradients(earlier)
            it.pending += 1
            it.spoilt = it.spoilt or spoilt
        return _collect(done)

    def optim_step(self, model: str, args: OptimStepArgs) -> dict[str, float]:
        """One optimizer step; its command columns. Gradients are gone afterwards, whatever the outcome.

        Raises NoGradients when no forward_backward came since the last step, NonFinite when a loss or a gradient is not
        finite: the weights and the optimizer are then as they were.
        """
        it = self._get(model)
        if not it.pending:
            raise NoGradients(
                "there are no gradients to apply", remedy="Send forward_backward before optim_step.", model=model
            )
        try:
            it.reduce_gradients()
            return it.optimizer.step(args, spoilt=it.spoilt)
        except TinsmithError as error:
            raise error.at(model=model) from None
        finally:
            it.clear_gradients()
            it.pending, it.spoilt = 0, False
            it.changed()

    def save(self, model: str, path: str | Path, meta: dict[str, Any] | None = None) -> None:
        """A checkpoint directory: weights, optimizer, `meta`. An existing one is replaced."""
        write_state(self._get(model), self.base, self.ranks, Path(path), meta or {}, gradients=False)

    def snapshot(self, model: str, path: str | Path, meta: dict[str, Any] | None = None) -> None:
        """A checkpoint directory with the accumulated gradients as well: all that `restore` needs."""
        write_state(self._get(model), self.base, self.ranks, Path(path), meta or {}, gradients=True)

    def load(self, model: str, path: str | Path, *, optimizer: bool) -> dict[str, Any]:
        """Take a checkpoint's weights, and the optimizer's state or a fresh one; gradients are dropped.

        Returns the `meta` of save. Raises UnknownVersion, DamagedCheckpoint, InvalidInput (of another kind or shape).
        """
        it = self._get(model)
        tensors, meta = self.ranks.each(lambda: read_state(it, it.args, Path(path)))
        put_state(it, tensors, optimizer=optimizer)
        return dict(meta["user"])

    def restore(self, model: str, path: str | Path) -> dict[str, Any]:
        """Make the model (again) exactly what `snapshot` saw, gradients included; returns its `meta`."""
        described = self.ranks.each(lambda: checkpoint.read_meta(Path(path)))
        args = CreateModelArgs.model_validate(described["args"])
        if model in self._models and self._models[model].args != args:
            self.unload(model)
        if model not in self._models:
            self.create(model, args)
        it = self._models[model]
        tensors, meta = self.ranks.each(lambda: read_state(it, args, Path(path)))
        put_state(it, tensors, optimizer=True)
        put_gradients(it, tensors, meta)
        return dict(meta["user"])

    def publish(self, model: str, path: str | Path) -> None:
        """A PEFT adapter directory, or a plain Hugging Face checkpoint after full fine-tuning."""
        self._get(model).publish(Path(path), self.path)

    def unload(self, model: str) -> None:
        """Forget the model and free its memory."""
        self._get(model).close()
        del self._models[model]

    def _get(self, model: str) -> Trainable:
        if model not in self._models:
            raise UnknownModel(
                "no model of that name is loaded",
                remedy=f"Create it; loaded are: {', '.join(self._models) or 'none'}.",
                model=model,
            )
        return self._models[model]

    def _load(self, dtype: torch.dtype) -> BaseModel:
        return self.ranks.each(lambda: load_base(self.path, name=self._alias, dtype=dtype))

    def _shard(self, base: BaseModel, reshard: Reshard) -> Scorer:
        scorer = Scorer(base)
        if self._recompute:
            checkpoint_layers(scorer)
        shard(scorer, self.ranks.mesh, self.device, reshard, self._dtype)
        return scorer

    def _make(self, args: CreateModelArgs) -> Trainable:
        if args.lora is not None:
            return LoraTrainable(args, args.lora, self._scorer, self._bank, self.ranks)
        # Trained weights are float32 whatever they are computed in: smaller types lose small updates.
        base = self._load(torch.float32)
        base.module.requires_grad_(True)
        return FullTrainable(args, self._shard(base, self._reshard), self.ranks)

    def _evaluate(self, loss: Loss, batch: MicroBatch, logprobs: Tensor, entropy: Tensor, config: Config) -> Evaluation:
        return evaluate(loss, TokenInputs(logprobs, entropy, batch.inputs, batch.mask), config)


def _collect(done: list[tuple[MicroBatch, Evaluation | None, Tensor]]) -> ForwardResult:
    """The rows that belong to datums, as arrays on the host."""
    columns: dict[str, list[npt.NDArray[np.float64]]] = {}
    logprobs: list[npt.NDArray[np.float32]] = []
    for batch, result, scored in done:
        rows = len(batch.indices)
        assert result is not None
        for name, column in result.columns.items():
            columns.setdefault(name, []).append(column[:rows].cpu().numpy())
        host = scored[:rows].float().cpu().numpy()
        logprobs.extend(host[row, :length].copy() for row, length in enumerate(batch.lengths))
    indices = np.array([index for batch, _, _ in done for index in batch.indices], dtype=np.int64)
    return ForwardResult(indices, {n: np.concatenate(parts) for n, parts in columns.items()}, logprobs)

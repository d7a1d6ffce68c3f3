"""AdamW for one model: its own state, its own gradient norm, and a step that happens wholly or not at all.

The update is torch.optim.AdamW's (decoupled weight decay, Loshchilov & Hutter; bias corrections from the betas of the
current step), the clip is torch.nn.utils.clip_grad_norm_'s (factor min(1, max_norm / (norm + 1e-6))).

Invariants:
- everything new is computed beside the old and checked over all ranks before the first parameter is written, so no
  weight or moment ever holds what a NaN, an infinity or an overflow produced;
- every rank of the group takes the same decision, because it is made from the same gathered numbers;
- state tensors are replaced, never written to: a state_dict stays what it was when later steps are taken.
The price is memory while a step runs: about four times the trainable parameters that this rank holds, and twice more
for plain ones, which are copied end to end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tinsmith.actors.engine.trainable.flat import Layout, check_like, sum_of_squares
from tinsmith.bus.protocol.commands import OptimStepArgs
from tinsmith.bus.protocol.errors import InvalidInput, NoGradients, NonFinite, UnsupportedModel

CLIP_EPS = 1e-6
"""Added to the norm in the clip's divisor, as torch's clip_grad_norm_ does."""
_FIRST, _SECOND = "exp_avg.", "exp_avg_sq."
_STEP, _SKIPPED = "step", "skipped_in_a_row"


@dataclass(frozen=True)
class _Proposal:
    """What a step would write, in rows."""

    parameters: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]


class AdamW:
    """Optimizer of one model over its named trainable parameters (plain tensors, or DTensors sharded over a mesh).

    A plain tensor is held alike by every rank; a DTensor's shards together are the parameter. Gradients are already
    reduced over ranks and are never changed here; a parameter without one counts as having gradient 0.
    `group` is the process group that holds all shards (None: this process holds all).
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, group: dist.ProcessGroup | None = None) -> None:
        if not parameters:
            raise UnsupportedModel("no parameter is trainable.", remedy="train at least one layer.")
        for name, parameter in parameters.items():
            if parameter.dtype not in (torch.float32, torch.float64):
                raise UnsupportedModel(
                    f"parameter {name!r} is {parameter.dtype}.",
                    remedy="hold trainable parameters in float32; small updates are lost below that.",
                )
        # Sorted, so that sums over parameters have one order whatever order the model lists them in.
        self._parameters = {name: parameters[name] for name in sorted(parameters)}
        self._names = tuple(self._parameters)
        self._group = group
        self._layout = Layout(self._parameters)
        self._first = [torch.zeros_like(row) for row in self._rows()]
        self._second = [torch.zeros_like(row) for row in self._rows()]
        self._step = 0
        self._skipped_in_a_row = 0

    @property
    def steps(self) -> int:
        """Steps taken; skipped ones don't count."""
        return self._step

    @torch.no_grad()
    def step(self, args: OptimStepArgs, *, spoilt: bool = False) -> dict[str, float]:
        """One step over the parameters' `.grad`; returns the command's columns.

        spoilt: whether a loss that led to them was not finite, the same on all ranks.

        grad_norm (before clipping), clip_coef (1: not clipped; 0: skipped), param_norm (after the step), update_norm
        (of what was added to the parameters), learning_rate, step, skipped (0 or 1). Norms are global L2 norms, summed
        in float64. Raises NoGradients, InvalidInput (an argument overflows the parameters' type), or NonFinite (as
        `on_non_finite` and `abort_after` say); then nothing was changed.
        """
        if all(parameter.grad is None for parameter in self._parameters.values()):
            raise NoGradients("there are no gradients to step with.", remedy="send forward_backward first.")
        gradients = self._layout.rows({name: parameter.grad for name, parameter in self._parameters.items()})
        largest = torch.finfo(gradients[0].dtype).max
        if max(args.lr * args.weight_decay, args.lr / (1 - args.beta1 ** (self._step + 1)), args.eps) > largest:
            raise InvalidInput(
                f"lr {args.lr:g}, weight_decay {args.weight_decay:g} or eps {args.eps:g} overflows float32.",
                remedy="send a smaller one.",
                field="lr",
            )
        (grad_norm,) = self._norms(gradients)
        clip_coef = 1.0
        if args.grad_clip_norm > 0:
            clip_coef = min(1.0, args.grad_clip_norm / (grad_norm + CLIP_EPS))
        # The norm bounds every element: below this no square overflows, which would freeze its parameter without a
        # word, and the new moments, weighted means of finite values, are finite. NaN fails the comparison too.
        if spoilt:
            return self._skip(args, grad_norm, "a loss that led to the gradients is not finite")
        if not grad_norm * clip_coef <= math.sqrt(largest):
            return self._skip(
                args, grad_norm, f"the gradient norm is {grad_norm:g}: not finite, or its square overflows"
            )
        if clip_coef < 1.0:
            gradients = list(torch._foreach_mul(gradients, clip_coef))
        parameters = self._rows()
        proposal = self._propose(parameters, gradients, args)
        update = list(torch._foreach_sub(proposal.parameters, parameters))
        param_norm, update_norm = self._norms(proposal.parameters, update)
        if not math.isfinite(param_norm + update_norm):
            return self._skip(args, grad_norm, f"the update is not finite (norm {update_norm})")
        self._layout.write(proposal.parameters)
        self._first, self._second = proposal.first, proposal.second
        self._step += 1
        self._skipped_in_a_row = 0
        return self._columns(args, grad_norm, clip_coef, param_norm, update_norm, skipped=0)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """Flat tensors for a checkpoint: exp_avg.NAME and exp_avg_sq.NAME (laid out like the parameter), step,
        skipped_in_a_row. Later steps don't change them.
        """
        state: dict[str, Tensor] = {}
        for prefix, rows in ((_FIRST, self._first), (_SECOND, self._second)):
            state |= {prefix + name: tensor for name, tensor in self._layout.named(rows).items()}
        state[_STEP] = torch.tensor(self._step, dtype=torch.int64)
        state[_SKIPPED] = torch.tensor(self._skipped_in_a_row, dtype=torch.int64)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave, bit for bit; full plain tensors are cut to this rank's shards.

        Raises InvalidInput that names the entry that is missing, unknown, or of another shape or type; then nothing was
        changed.
        """
        wanted = {prefix + name for prefix in (_FIRST, _SECOND) for name in self._names} | {_STEP, _SKIPPED}
        for name in sorted(wanted ^ set(state)):
            what = "lacks" if name in wanted else "has the unknown entry"
            raise InvalidInput(
                f"the optimizer state {what} {name!r}.",
                remedy="load the state of a model made the same way.",
                field=name,
            )
        first, second = (
            self._layout.rows(
                {
                    name: check_like(state[prefix + name], parameter, prefix + name)
                    for name, parameter in self._parameters.items()
                }
            )
            for prefix in (_FIRST, _SECOND)
        )
        self._first, self._second = first, second
        self._step, self._skipped_in_a_row = int(state[_STEP].item()), int(state[_SKIPPED].item())

    def _propose(self, parameters: list[Tensor], gradients: list[Tensor], args: OptimStepArgs) -> _Proposal:
        """torch.optim.AdamW's arithmetic in its order, out of place."""
        step = self._step + 1
        correction1, correction2 = 1 - args.beta1**step, 1 - args.beta2**step
        first = torch._foreach_lerp(self._first, gradients, 1 - args.beta1)
        second = torch._foreach_mul(self._second, args.beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - args.beta2)
        divisor = torch._foreach_sqrt(second)
        torch._foreach_div_(divisor, math.sqrt(correction2))
        torch._foreach_add_(divisor, args.eps)
        proposed = torch._foreach_mul(parameters, 1 - args.lr * args.weight_decay)
        torch._foreach_addcdiv_(proposed, first, divisor, -args.lr / correction1)
        return _Proposal(list(proposed), list(first), list(second))

    def _skip(self, args: OptimStepArgs, grad_norm: float, why: str) -> dict[str, float]:
        """Nothing is changed but the count of skips in a row; raises NonFinite unless a skip is what was asked for."""
        if args.on_non_finite == "fail":
            raise NonFinite(
                f"{why}; nothing was changed.",
                remedy="look at the last batches' losses; on_non_finite='skip' leaves such steps out.",
            )
        in_a_row = self._skipped_in_a_row + 1
        if args.abort_after is not None and in_a_row >= args.abort_after:
            raise NonFinite(
                f"{why}, in {in_a_row} steps in a row; nothing was changed.",
                remedy="load an earlier checkpoint, or lower the learning rate.",
            )
        self._skipped_in_a_row = in_a_row
        (param_norm,) = self._norms(self._rows())
        return self._columns(args, grad_norm, 0.0, param_norm, 0.0, skipped=1)

    def _columns(
        self,
        args: OptimStepArgs,
        grad_norm: float,
        clip_coef: float,
        param_norm: float,
        update_norm: float,
        *,
        skipped: int,
    ) -> dict[str, float]:
        return {
            "grad_norm": grad_norm,
            "clip_coef": clip_coef,
            "param_norm": param_norm,
            "update_norm": update_norm,
            "learning_rate": args.lr,
            "step": float(self._step),
            "skipped": float(skipped),
        }

    def _norms(self, *lists: list[Tensor]) -> list[float]:
        """The global norm of each list of rows.

        One exchange: sums of squares in float64 [lists, rows], gathered from all ranks, summed by rank and by row.
        """
        squares = torch.stack([torch.stack([sum_of_squares(row) for row in rows]) for rows in lists])
        if self._group is not None and any(self._layout.sharded):
            sharded = torch.tensor(self._layout.sharded, device=squares.device)
            mine = torch.where(torch.tensor(self._layout.counted_here, device=squares.device), squares, 0.0)
            ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
            dist.all_gather(ranks, mine, group=self._group)
            # A plain tensor is held alike by every rank and counted once, from here.
            squares = torch.where(sharded, torch.stack(ranks).sum(0), squares)
        return [math.sqrt(value) for value in squares.sum(1).tolist()]

    def _rows(self) -> list[Tensor]:
        return self._layout.rows({name: parameter.detach() for name, parameter in self._parameters.items()})

"""Per-datum columns that every loss has: float64 sums, counts and extremes over the tokens that bear loss.

A row never averages and never holds NaN for lack of tokens: without loss-bearing tokens sums, counts and moments are
0, maxima -inf and minima +inf (the identities of their reductions).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinsmith.actors.engine.losses.contract import SAMPLER, LossOutput, TokenInputs, keep

_ALWAYS = ("loss", "entropy", "num_tokens", "tokens", "sequences")
_SAMPLER = (
    "ratio_sum",
    "ratio_max",
    "ratio_min",
    "clipped_tokens",
    "kl_k1_sum",
    "kl_k3_sum",
    "logprob_gap_sum",
    "logprob_gap_max",
    "logprob_gap_mean",
    "logprob_gap_m2",
)
COMMON_COLUMNS = frozenset((*_ALWAYS, *_SAMPLER))


def datum_columns(
    tokens: TokenInputs, output: LossOutput, per_token: Tensor, loss_mask: Tensor, *, has_sampler: bool
) -> dict[str, Tensor]:
    """name -> float64 [rows], without gradient.

    per_token [rows, L] is masked already; loss_mask bool [rows, L]. `num_tokens` counts tokens that bear loss, `tokens`
    all valid ones. With the sampler's log-probs q and gap = p - q: k1 = -gap, k3 = exp(gap) - 1 - gap (Schulman,
    "Approximating KL Divergence": both estimate KL(q || p) on tokens drawn from q), and the mean and the sum of squared
    deviations (m2) of gap, mergeable over datums with num_tokens as the count.
    """
    with torch.no_grad():
        count = loss_mask.sum(-1).double()
        columns = {
            "loss": per_token.double().sum(-1),
            "entropy": keep(loss_mask, tokens.entropy).double().sum(-1),
            "num_tokens": count,
            "tokens": tokens.mask.sum(-1).double(),
            "sequences": torch.ones_like(count),
        }
        if has_sampler:
            columns.update(_sampler_columns(tokens, output, loss_mask, count))
        return columns


def _sampler_columns(tokens: TokenInputs, output: LossOutput, loss_mask: Tensor, count: Tensor) -> dict[str, Tensor]:
    gap = keep(loss_mask, tokens.logprobs.double()) - keep(loss_mask, tokens.inputs[SAMPLER].double())
    ratio = torch.exp(gap) if output.ratio is None else output.ratio.double()
    gap_sum = gap.sum(-1)
    mean = gap_sum / count.clamp(min=1)
    deviation = keep(loss_mask, gap - mean[:, None])
    clipped = torch.zeros_like(loss_mask) if output.clipped is None else output.clipped & loss_mask
    return {
        "ratio_sum": keep(loss_mask, ratio).sum(-1),
        "ratio_max": ratio.masked_fill(~loss_mask, -torch.inf).amax(-1),
        "ratio_min": ratio.masked_fill(~loss_mask, torch.inf).amin(-1),
        "clipped_tokens": clipped.sum(-1).double(),
        "kl_k1_sum": -gap_sum,
        # expm1(gap) - gap is k3 without the cancellation of exp(gap) - 1 near 0; exactly 0 at masked positions.
        "kl_k3_sum": (torch.expm1(gap) - gap).sum(-1),
        "logprob_gap_sum": gap_sum,
        "logprob_gap_max": gap.masked_fill(~loss_mask, -torch.inf).amax(-1),
        "logprob_gap_mean": mean,
        "logprob_gap_m2": deviation.square().sum(-1),
    }

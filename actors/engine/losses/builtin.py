"""The six built-in losses, with the formulas of the Tinker documentation.

Notation: p the model's and q the sampler's log-prob of the target, r = exp(p - q), A the advantage, w the weight,
sg the stop-gradient. Position i of the tokens predicts target i. Every loss is summed over the tokens that bear loss.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tinsmith.actors.engine.losses.contract import (
    SAMPLER,
    BadValue,
    Columnar,
    Config,
    ConfigField,
    Loss,
    LossOutput,
    TokenInputs,
    keep,
)

LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
RATIO_MASK = "sequence_ratio_mask"
_WEIGHTS = ("weights",)
_ADVANTAGES = ("mask", "advantages")
_MASK = ("mask",)


def cross_entropy(tokens: TokenInputs, config: Config) -> LossOutput:
    """Sum of -p * w; targets [n] or [n, K] with weights of the same shape (absent: 1). Loss-bearing: w != 0."""
    bearing = tokens.bearing(_WEIGHTS)
    weights = tokens.inputs.get("weights")
    if weights is None:
        weights = torch.ones_like(tokens.logprobs)
    # Masked by the weight itself: of K targets those of weight 0 take no part, even at -inf.
    used = (weights != 0) & (tokens.mask if weights.dim() == 2 else tokens.mask[..., None])
    terms = -keep(used, tokens.logprobs) * keep(used, weights)
    return LossOutput(terms.sum(-1) if terms.dim() == 3 else terms, bearing)


def importance_sampling(tokens: TokenInputs, config: Config) -> LossOutput:
    """Sum of -r * A."""
    bearing = tokens.bearing(_ADVANTAGES)
    advantages = keep(bearing, tokens.inputs["advantages"])
    # Where A is 0 the term is 0 even if r overflows.
    gap = keep(bearing & (advantages != 0), tokens.logprobs - tokens.inputs[SAMPLER])
    per_token = -torch.exp(gap) * advantages
    return LossOutput(per_token, bearing, {"pg_loss": _row_sum(per_token)})


def ppo(tokens: TokenInputs, config: Config) -> LossOutput:
    """Sum of -min(r * A, clip(r, low, high) * A)."""
    bearing = tokens.bearing(_ADVANTAGES)
    gap = tokens.logprobs - tokens.inputs[SAMPLER]
    per_token, clipped = _clipped_objective(tokens, config, bearing, gap, gap.detach())
    return LossOutput(per_token, bearing, {"pg_loss": _row_sum(per_token)}, clipped=clipped)


def gspo(tokens: TokenInputs, config: Config) -> LossOutput:
    """PPO's clip on the sequence ratio: s = exp(mean of p - q over sequence_ratio_mask), r = sg(s) exp(p - sg(p)).

    Each token has the value of its sequence's ratio and the gradient of its own log-prob.
    """
    bearing = tokens.bearing(_ADVANTAGES)
    averaged = tokens.bearing((RATIO_MASK,))
    logprobs = tokens.logprobs
    # A row without averaged tokens has ratio 0 / 0; it bears no loss either (checked before), so nothing reads it.
    count = averaged.sum(-1, keepdim=True)
    # In float64, so that the mean does not hang on how far the row is padded.
    log_ratio = keep(averaged, logprobs.detach() - tokens.inputs[SAMPLER]).double().sum(-1, keepdim=True) / count
    value = log_ratio.to(logprobs.dtype).expand_as(logprobs)
    per_token, clipped = _clipped_objective(tokens, config, bearing, value + (logprobs - logprobs.detach()), value)
    return LossOutput(per_token, bearing, {"pg_loss": _row_sum(per_token)}, ratio=torch.exp(value), clipped=clipped)


def cispo(tokens: TokenInputs, config: Config) -> LossOutput:
    """Sum of -sg(clip(r, low, high)) * p * A. Clipped tokens: those whose r lies outside the thresholds."""
    bearing = tokens.bearing(_ADVANTAGES)
    logprobs = keep(bearing, tokens.logprobs)
    low, high = _thresholds(tokens, config)
    ratio = torch.exp(logprobs.detach() - keep(bearing, tokens.inputs[SAMPLER]))
    weight = torch.minimum(torch.maximum(ratio, low), high)
    per_token = -weight * logprobs * keep(bearing, tokens.inputs["advantages"])
    clipped = bearing & ((ratio < low) | (ratio > high))
    return LossOutput(per_token, bearing, {"pg_loss": _row_sum(per_token)}, clipped=clipped)


def dro(tokens: TokenInputs, config: Config) -> LossOutput:
    """Sum of -(p * A - beta / 2 * (p - q)^2); every token bears loss unless `mask` is given. pg_loss: -p * A alone."""
    bearing = tokens.bearing(_MASK)
    logprobs = keep(bearing, tokens.logprobs)
    gap = logprobs - keep(bearing, tokens.inputs[SAMPLER])
    policy = -logprobs * keep(bearing, tokens.inputs["advantages"])
    per_token = policy + 0.5 * float(config["beta"]) * gap.square()
    return LossOutput(per_token, bearing, {"pg_loss": _row_sum(policy)})


def _clipped_objective(
    tokens: TokenInputs, config: Config, bearing: Tensor, gap: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r) A), and where the clipped branch is the smaller one; r = exp(gap), `value` is sg(gap).

    `gap` may hold anything at masked positions: their advantage counts as 0 and r is not computed for them.

    The branch is chosen first and r computed for the other one alone: the gradient of exp at an overflowing r that
    is clipped away would be 0 * inf.
    """
    low, high = _thresholds(tokens, config)
    advantages = keep(bearing, tokens.inputs["advantages"])
    ratio = torch.exp(value)
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    bound = torch.where(advantages > 0, high, low)
    used = torch.where(clipped, bound, torch.exp(keep(~clipped & (advantages != 0), gap)))
    return -used * advantages, clipped


def _thresholds(tokens: TokenInputs, config: Config) -> tuple[Tensor, Tensor]:
    """Low and high [rows, L]: the per-token input of that name where given, else the config's value."""
    low, high = (
        keep(tokens.mask, tokens.inputs[name])
        if name in tokens.inputs
        else torch.full_like(tokens.logprobs, float(config[name]), requires_grad=False)
        for name in (LOW, HIGH)
    )
    return low, high


def _row_sum(per_token: Tensor) -> Tensor:
    return per_token.detach().double().sum(-1)


def _thresholds_in_order(batch: Columnar, config: Config) -> BadValue | None:
    """Per-token thresholds must be >= 0 and low <= high, also against the config's value of the other one."""
    if LOW not in batch.inputs and HIGH not in batch.inputs:
        return None
    low = batch.inputs.get(LOW, np.float32(float(config[LOW])))
    high = batch.inputs.get(HIGH, np.float32(float(config[HIGH])))
    wrong = np.asarray((low < 0) | (low > high))
    if not wrong.any():
        return None
    name = LOW if LOW in batch.inputs else HIGH
    return BadValue(
        batch.datum(int(wrong.argmax())),
        name,
        "a per-token threshold is below 0, or low exceeds high",
        f"send 0 <= {LOW} <= {HIGH} at every token, or leave both to the loss config.",
    )


def _mask_is_binary(batch: Columnar, config: Config) -> BadValue | None:
    if "mask" not in batch.inputs:
        return None
    wrong = (batch.inputs["mask"] != 0) & (batch.inputs["mask"] != 1)
    if not wrong.any():
        return None
    where = int(wrong.argmax())
    return BadValue(
        batch.datum(where),
        "mask",
        f"mask holds {batch.inputs['mask'][where]}, neither 0 nor 1",
        "a mask selects tokens; scale the advantages to weigh them.",
    )


def _ratio_has_tokens(batch: Columnar, config: Config) -> BadValue | None:
    """A sequence ratio is a mean over the tokens of sequence_ratio_mask; a datum that bears loss needs at least one."""
    averaged = np.logical_or.reduceat(batch.inputs[RATIO_MASK] != 0, batch.starts)
    wrong = np.logical_or.reduceat(batch.bearing, batch.starts) & ~averaged
    if not wrong.any():
        return None
    return BadValue(
        int(wrong.argmax()),
        RATIO_MASK,
        "marks no token, so the sequence ratio of this datum is undefined, yet some of its tokens bear loss",
        "mark the sampled tokens with 1, or set the datum's advantages to 0.",
    )


def _policy_checks(batch: Columnar, config: Config) -> BadValue | None:
    return _mask_is_binary(batch, config) or _thresholds_in_order(batch, config)


def _gspo_checks(batch: Columnar, config: Config) -> BadValue | None:
    return _policy_checks(batch, config) or _ratio_has_tokens(batch, config)


def _clip(low: float, high: float) -> tuple[ConfigField, ...]:
    return ConfigField(LOW, default=low, low=0.0), ConfigField(HIGH, default=high, low=0.0)


_POLICY = (SAMPLER, "advantages")
_CLIP_INPUTS = ("mask", LOW, HIGH)

BUILTIN: tuple[Loss, ...] = (
    Loss("cross_entropy", cross_entropy, optional=_WEIGHTS, bearing=_WEIGHTS, multi_target=True),
    Loss(
        "importance_sampling",
        importance_sampling,
        required=_POLICY,
        optional=_MASK,
        bearing=_ADVANTAGES,
        columns=("pg_loss",),
        check=_mask_is_binary,
    ),
    Loss(
        "ppo",
        ppo,
        required=_POLICY,
        optional=_CLIP_INPUTS,
        config=_clip(0.8, 1.2),
        bearing=_ADVANTAGES,
        columns=("pg_loss",),
        low_high=((LOW, HIGH),),
        check=_policy_checks,
    ),
    Loss(
        "cispo",
        cispo,
        required=_POLICY,
        optional=_CLIP_INPUTS,
        config=_clip(0.0, 4.0),
        bearing=_ADVANTAGES,
        columns=("pg_loss",),
        low_high=((LOW, HIGH),),
        check=_policy_checks,
    ),
    Loss(
        "dro",
        dro,
        required=_POLICY,
        optional=_MASK,
        config=(ConfigField("beta", low=0.0),),
        bearing=_MASK,
        columns=("pg_loss",),
        check=_mask_is_binary,
    ),
    Loss(
        "gspo",
        gspo,
        required=(*_POLICY, RATIO_MASK),
        optional=_CLIP_INPUTS,
        config=_clip(0.8, 1.2),
        bearing=_ADVANTAGES,
        averaging=(RATIO_MASK,),
        columns=("pg_loss",),
        low_high=((LOW, HIGH),),
        check=_gspo_checks,
    ),
)

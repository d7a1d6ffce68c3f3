"""The plainest trainer there is, to hold the product against: float64, one sequence at a time, one process.

No batching, packing, padding, sharding or chunking, and no line of the product: the formulas are written out again,
token by token, from the documentation of the losses and from the AdamW paper. Slow on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

INF = math.inf


class ReferenceTrainer:
    """Trains a Hugging Face causal language model in place, in float64.

    `trainable`: name -> parameter of the model to train (as for adapters); None: those that require a gradient.
    A datum is anything with `.tokens` [n] and `.inputs` {name: [n] or [n, K]}.
    """

    def __init__(self, model: torch.nn.Module, trainable: Mapping[str, Tensor] | None = None) -> None:
        # double() changes parameters in place (their .data), so a given mapping keeps pointing at the model's own.
        self.model = model.double().eval()
        named = {name: p for name, p in model.named_parameters() if p.requires_grad} if trainable is None else trainable
        self.parameters: dict[str, Tensor] = dict(named)
        self.first = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.steps = 0

    def score(self, tokens: Any, targets: Any) -> tuple[list[Any], list[float], list[Tensor]]:
        """Of one sequence: log-probs of the targets (with gradient; K of them a token where targets are [n, K]), the
        entropy at each position, and log-probs over the whole vocabulary [vocab] at each position."""
        ids = torch.as_tensor([[int(t) for t in tokens]])
        logits = self.model(input_ids=ids, use_cache=False).logits[0].double()
        logprobs, entropies, rows = [], [], []
        for position, target in enumerate(targets):
            row = logits[position] - torch.logsumexp(logits[position], dim=0)
            many = getattr(target, "ndim", 0) == 1 or isinstance(target, list)
            logprobs.append([row[int(k)] for k in target] if many else row[int(target)])
            entropies.append(-_number((row.exp() * row).sum()))
            rows.append(row)
        return logprobs, entropies, rows

    def forward(self, data: Sequence[Any], loss: str, config: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
        """As forward_backward, without gradients."""
        with torch.no_grad():
            return self._run(data, loss, config or {}, backward=False)

    def forward_backward(
        self, data: Sequence[Any], loss: str, config: Mapping[str, Any] | None = None
    ) -> tuple[list[Tensor], dict[str, list[float]]]:
        """(log-probs of each datum [n] or [n, K], columns name -> [datums]); gradients add up in the parameters."""
        return self._run(data, loss, config or {}, backward=True)

    def gradients(self) -> dict[str, Tensor]:
        """Copies of what has been accumulated; 0 where nothing was."""
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone().double()
            for name, p in self.parameters.items()
        }

    def optim_step(self, args: Any = None, **kwargs: float) -> dict[str, float]:
        """One AdamW step; `args` has lr, beta1, beta2, eps, weight_decay, grad_clip_norm (or give them by keyword)."""
        names = ("lr", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
        defaults = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
        given = kwargs if args is None else {name: getattr(args, name) for name in names}
        lr, beta1, beta2, eps, decay, max_norm = (float({**defaults, **given}[name]) for name in names)
        gradients = self.gradients()
        norm = math.sqrt(sum(_number((g * g).sum()) for g in gradients.values()))
        coefficient = min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
        self.steps += 1
        update = 0.0
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                g = gradients[name] * coefficient
                self.first[name] = beta1 * self.first[name] + (1 - beta1) * g
                self.second[name] = beta2 * self.second[name] + (1 - beta2) * g * g
                m = self.first[name] / (1 - beta1**self.steps)
                v = self.second[name] / (1 - beta2**self.steps)
                new = parameter - lr * decay * parameter - lr * m / (v.sqrt() + eps)
                update += _number(((new - parameter) ** 2).sum())
                parameter.copy_(new)
                parameter.grad = None
        weight = math.sqrt(sum(_number((p.double() ** 2).sum()) for p in self.parameters.values()))
        return {
            "grad_norm": norm,
            "clip_coef": coefficient,
            "param_norm": weight,
            "update_norm": math.sqrt(update),
            "learning_rate": lr,
            "step": float(self.steps),
            "skipped": 0.0,
        }

    def _run(
        self, data: Sequence[Any], loss: str, config: Mapping[str, Any], *, backward: bool
    ) -> tuple[list[Tensor], dict[str, list[float]]]:
        scored: list[Tensor] = []
        rows: list[dict[str, float]] = []
        for datum in data:
            logprobs, entropies, _ = self.score(datum.tokens, datum.inputs["target_tokens"])
            total, row = reference_loss(loss, logprobs, entropies, datum.inputs, config)
            if backward and isinstance(total, Tensor) and total.requires_grad:
                total.backward()
            numbers = [[_number(k) for k in p] if isinstance(p, list) else _number(p) for p in logprobs]
            scored.append(torch.tensor(numbers, dtype=torch.float64))
            rows.append(row)
        return scored, {name: [row[name] for row in rows] for name in rows[0]}


def _number(value: Any) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def reference_loss(
    loss: str, logprobs: Sequence[Any], entropies: Sequence[float], inputs: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[Any, dict[str, float]]:
    """(the loss of one sequence with gradient, its row of columns); `logprobs` are scalars, or lists of K scalars."""
    n = len(logprobs)
    if loss == "cross_entropy":
        return _cross_entropy(logprobs, entropies, inputs)
    q = [float(x) for x in inputs["logprobs"]]
    a = [float(x) for x in inputs["advantages"]]
    if "mask" in inputs:
        chosen = [t for t in range(n) if float(inputs["mask"][t]) != 0]
    elif loss == "dro":
        chosen = list(range(n))
    else:
        chosen = [t for t in range(n) if a[t] != 0]
    default_low, default_high = {"cispo": (0.0, 4.0)}.get(loss, (0.8, 1.2))

    def threshold(name: str, default: float, t: int) -> float:
        return float(inputs[name][t]) if name in inputs else float(config.get(name, default))

    total: Any = 0.0
    policy = 0.0
    clipped = 0
    ratios: list[float] = []
    if loss == "gspo":
        over = [t for t in range(n) if float(inputs["sequence_ratio_mask"][t]) != 0]
        sequence = math.exp(sum(_number(logprobs[t]) - q[t] for t in over) / len(over)) if over else 1.0
    for t in chosen:
        p = logprobs[t]
        now = _number(p)
        low, high = threshold("clip_low_threshold", default_low, t), threshold("clip_high_threshold", default_high, t)
        ratio = math.exp(now - q[t])
        if loss == "importance_sampling":
            term = -torch.exp(p - q[t]) * a[t]
            policy += _number(term)
        elif loss == "ppo":
            bounded = min(max(ratio, low), high)
            if bounded * a[t] < ratio * a[t]:
                term, clipped = torch.tensor(-bounded * a[t], dtype=torch.float64), clipped + 1
            else:
                term = -torch.exp(p - q[t]) * a[t]
            policy += _number(term)
        elif loss == "gspo":
            ratio = sequence
            bounded = min(max(ratio, low), high)
            if bounded * a[t] < ratio * a[t]:
                term, clipped = torch.tensor(-bounded * a[t], dtype=torch.float64), clipped + 1
            else:
                term = -ratio * torch.exp(p - now) * a[t]
            policy += _number(term)
        elif loss == "cispo":
            bounded = min(max(ratio, low), high)
            clipped += ratio < low or ratio > high
            term = -bounded * p * a[t]
            policy += _number(term)
        elif loss == "dro":
            term = -(p * a[t] - 0.5 * float(config["beta"]) * (p - q[t]) ** 2)
            policy += -now * a[t]
        else:
            raise ValueError(loss)
        ratios.append(ratio)
        total = total + term
    gaps = [_number(logprobs[t]) - q[t] for t in chosen]
    mean = sum(gaps) / len(gaps) if gaps else 0.0
    return total, {
        "loss": _number(total),
        "pg_loss": policy,
        "entropy": sum(float(entropies[t]) for t in chosen),
        "num_tokens": float(len(chosen)),
        "tokens": float(n),
        "sequences": 1.0,
        "ratio_sum": sum(ratios),
        "ratio_max": max(ratios, default=-INF),
        "ratio_min": min(ratios, default=INF),
        "clipped_tokens": float(clipped),
        "kl_k1_sum": -sum(gaps),
        "kl_k3_sum": sum(math.exp(g) - 1 - g for g in gaps),
        "logprob_gap_sum": sum(gaps),
        "logprob_gap_max": max(gaps, default=-INF),
        "logprob_gap_mean": mean,
        "logprob_gap_m2": sum((g - mean) ** 2 for g in gaps),
    }


def _cross_entropy(
    logprobs: Sequence[Any], entropies: Sequence[float], inputs: Mapping[str, Any]
) -> tuple[Any, dict[str, float]]:
    total: Any = 0.0
    entropy = 0.0
    bearing = 0
    for t, p in enumerate(logprobs):
        ps = p if isinstance(p, list) else [p]
        w = inputs["weights"][t] if "weights" in inputs else [1.0] * len(ps)
        ws = [float(x) for x in w] if isinstance(p, list) or isinstance(w, list) else [float(w)]
        for one, weight in zip(ps, ws, strict=True):
            if weight != 0:
                total = total - one * weight
        if any(weight != 0 for weight in ws):
            bearing += 1
            entropy += float(entropies[t])
    return total, {
        "loss": _number(total),
        "entropy": entropy,
        "num_tokens": float(bearing),
        "tokens": float(len(logprobs)),
        "sequences": 1.0,
    }

"""What a case must give, by the float64 reference trainer, and how near the product must come to it.

TOLERANCE is 1e-5, relative. The product computes in float32 (6e-8), so through a small model and sums of some hundred
terms it comes within about 1e-6 of float64; whatever is weighed, divided or counted wrongly is off by 1e-2 and more.
A sum whose terms cancel is as exact as its terms: it is measured against their magnitude.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference.reference import ReferenceTrainer
from torch import nn

from tinsmith.bus.protocol.datum import Datum

TOLERANCE = 1e-5
ROUNDING = 2.0**-23
Rows = dict[str, list[float]]
COUNTS = frozenset({"num_tokens:sum", "tokens:sum", "sequences:sum", "step", "skipped", "learning_rate"})
"""Keys that must be exactly equal."""
OF_THE_PLAN = frozenset({"tokens_computed:sum", "padding_share:mean", "padding_share:sum", "micro_batches:sum"})
"""Facts about how the work was cut: all that may depend on it."""


@cache
def _model(path: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    # Experts one by one: the fused kernel knows no float64.
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    return model.eval().requires_grad_(False)


class Judge:
    """One model in float64: all weights (`adapters` None), or adapters name -> array on a frozen base.

    Adapters are computed here as x A^T B^T * scale beside each layer, without peft.
    """

    def __init__(self, path: Path, adapters: Mapping[str, np.ndarray] | None = None, scale: float = 1.0) -> None:
        module = copy.deepcopy(_model(path))
        trained: dict[str, torch.Tensor] | None = None
        if adapters is None:
            module.requires_grad_(True)
        else:
            trained = {n: torch.from_numpy(a).double().requires_grad_() for n, a in adapters.items()}
            layers = dict(module.named_modules())
            for name in {n.partition(".lora_")[0] for n in adapters}:
                a, b = trained[f"{name}.lora_A.weight"], trained[f"{name}.lora_B.weight"]
                layers[name].register_forward_hook(
                    lambda layer, inputs, output, a=a, b=b: output + scale * (inputs[0] @ a.T) @ b.T
                )
        self.trainer = ReferenceTrainer(module, trained)
        self.magnitude = 0.0
        """Sum over datums since the last step of each one's gradient norm: what the gradient is exact against."""

    def score(self, tokens: Any, targets: Any) -> np.ndarray:
        """float64 [n] or [n, K]: log-probs of the targets."""
        with torch.no_grad():
            logits = self.trainer.model(input_ids=torch.as_tensor(np.asarray(tokens))[None].long()).logits[0]
            chosen = torch.as_tensor(np.asarray(targets)).reshape(len(logits), -1)
            return logits.log_softmax(-1).gather(-1, chosen).reshape(np.shape(targets)).numpy()

    def forward_backward(self, data: Sequence[Datum], loss: str, config: dict[str, Any]) -> tuple[list[Any], Rows]:
        scored, rows = [], []
        before = self.trainer.gradients()
        for datum in data:
            logprobs, row = self.trainer.forward_backward([datum], loss, config)
            after = self.trainer.gradients()
            self.magnitude += norm({name: after[name] - before[name] for name in after})
            before = after
            scored.append(logprobs[0].numpy())
            rows.append(row)
        return scored, {name: [row[name][0] for row in rows] for name in rows[0]}

    def step(self, args: Mapping[str, float]) -> dict[str, float]:
        self.magnitude = 0.0
        return self.trainer.optim_step(**args)


def norm(tensors: Mapping[str, Any]) -> float:
    """L2 norm over all tensors together."""
    return math.sqrt(sum(float((torch.as_tensor(t).double() ** 2).sum()) for t in tensors.values()))


def metrics_of(rows: Rows) -> dict[str, float]:
    """Every metric of forward and forward_backward that the data alone determine, from the reference's rows."""
    count = sum(rows["num_tokens"])
    part = [i for i, n in enumerate(rows["num_tokens"]) if n]
    out = {
        "loss:sum": math.fsum(rows["loss"]),
        "total_loss:sum": math.fsum(rows["loss"]),
        "entropy_loss:sum": math.fsum(rows["entropy"]),
        "entropy:sum": math.fsum(rows["entropy"]),
        "num_tokens:sum": count,
        "tokens:sum": math.fsum(rows["tokens"]),
        "sequences:sum": float(len(rows["loss"])),
    }
    means = {"loss": "loss", "entropy": "entropy"}
    if "pg_loss" in rows:
        out["pg_loss:sum"] = math.fsum(rows["pg_loss"])
        means |= {"ratio": "ratio_sum", "clip_fraction": "clipped_tokens", "kl_k1": "kl_k1_sum", "kl_k3": "kl_k3_sum"}
        means |= {"logprob_gap": "logprob_gap_sum"}
        out |= {f"{name}:sum": math.fsum(rows[column]) for name, column in means.items()}
        # m2 + n mean^2 of each datum is its sum of squares.
        moments = zip(rows["num_tokens"], rows["logprob_gap_mean"], rows["logprob_gap_m2"], strict=True)
        squares = math.fsum(m2 + n * mean * mean for n, mean, m2 in moments)
        out["logprob_gap_squares:sum"] = squares
        if count:
            mean = out["logprob_gap:sum"] / count
            out["logprob_gap:std"] = out["logprob_gap_std:unique"] = math.sqrt(max(0.0, squares / count - mean * mean))
            out["ratio:max"] = max(rows["ratio_max"][i] for i in part)
            out["ratio:min"] = min(rows["ratio_min"][i] for i in part)
            out["logprob_gap:max"] = max(rows["logprob_gap_max"][i] for i in part)
    if count:
        out |= {f"{name}:mean": math.fsum(rows[column]) / count for name, column in means.items()}
    return out


def assert_metrics(got: Mapping[str, float], rows: Rows) -> None:
    """Every published key is there, no other one is, and each has the value of the reference."""
    expected = metrics_of(rows)
    assert set(got) - OF_THE_PLAN == set(expected), sorted((set(got) - OF_THE_PLAN) ^ set(expected))
    tokens = expected["num_tokens:sum"]
    for key, value in expected.items():
        if key in COUNTS or key.startswith("clip_fraction:sum"):
            assert got[key] == value, key
        else:
            # A sum over n tokens is exact to n times what a token is; 1 nat is the magnitude of a token's term.
            scale = max(1.0, tokens) if key.endswith(":sum") else 1.0
            assert abs(got[key] - value) <= TOLERANCE * max(scale, abs(value)), (key, got[key], value)


def assert_logprobs(got: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    assert len(got) == len(expected)
    for datum, (left, right) in enumerate(zip(got, expected, strict=True)):
        assert left.shape == right.shape
        np.testing.assert_allclose(left, right, rtol=TOLERANCE, atol=TOLERANCE, err_msg=f"datum {datum}")


def assert_tensors(got: Mapping[str, np.ndarray], expected: Mapping[str, Any], scale: float) -> None:
    """The difference of each tensor, as an L2 norm, is within the tolerance of `scale`."""
    assert set(got) == set(expected)
    for name, value in expected.items():
        distance = norm({name: torch.as_tensor(got[name]).double() - torch.as_tensor(value).double().detach()})
        assert distance <= TOLERANCE * scale, (name, distance, scale)

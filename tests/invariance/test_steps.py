"""Fifty steps through the engine are torch.optim.AdamW's, for each of two models that take turns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from invariance.cases import Bearing, make_datum
from invariance.groups import Call, create, forward_backward, step
from invariance.judge import TOLERANCE, Judge
from invariance.script import Bases, Groups

STEPS = 50


def arguments(number: int) -> dict[str, float]:
    return {
        "lr": 1e-2 / (1 + number % 7),
        "beta1": 0.9 if number < 20 else 0.7,
        "beta2": 0.95 if number % 3 else 0.999,
        "eps": 1e-8 if number < 30 else 1e-4,
        "weight_decay": 0.1 * (number % 2),
        "grad_clip_norm": 0.0 if number % 4 else 0.5,
    }


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
def test_fifty_steps_equal_torch(group_of: Groups, base_of: Bases, lora: dict | None) -> None:
    base = base_of("llama")
    judge = Judge(base)
    random = np.random.default_rng(0)
    calls = [create("x", {"rank": 2}), create("m", lora), Call("weights")]
    for number in range(STEPS):
        data = [make_datum(judge, random, "cross_entropy", n, Bearing("some")) for n in (9, 4)]
        if number % 10 == 0:
            calls += [forward_backward(data, "cross_entropy", model="x"), step("x", lr=0.3, grad_clip_norm=1e-3)]
        calls += [forward_backward(data, "cross_entropy"), Call("gradients"), step(**arguments(number))]
    calls.append(Call("weights"))
    answers = group_of(2).run(base, calls)
    params = {name: torch.tensor(value).requires_grad_() for name, value in answers[2].tensors.items()}
    judged = torch.optim.AdamW(params.values(), lr=1.0)
    own = [answer for call, answer in zip(calls, answers, strict=True) if call.model == "m"][2:]
    for number in range(STEPS):
        _, gradients, stepped = own[3 * number : 3 * number + 3]
        args = arguments(number)
        for name, param in params.items():
            param.grad = torch.tensor(gradients.tensors[name])
        limit = args["grad_clip_norm"] or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(list(params.values()), limit)
        assert stepped.metrics["grad_norm"] == pytest.approx(norm.item(), rel=TOLERANCE)
        assert stepped.metrics["clip_coef"] == pytest.approx(min(1.0, limit / (norm.item() + 1e-6)), rel=TOLERANCE)
        assert stepped.metrics["learning_rate"] == args["lr"]
        judged.param_groups[0].update(
            lr=args["lr"],
            betas=(args["beta1"], args["beta2"]),
            eps=args["eps"],
            weight_decay=args["weight_decay"],
        )
        judged.step()
    for name, param in params.items():
        torch.testing.assert_close(torch.tensor(own[-1].tensors[name]), param.detach(), rtol=1e-5, atol=1e-5)

"""Chunked scoring equals the model's own logits and autograd, through plain, adapted and trainable heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import VOCAB

from tinsmith.actors.engine.model import head as score
from tinsmith.actors.engine.model.base import load_base
from tinsmith.actors.engine.model.fsdp import Scorer
from tinsmith.actors.engine.model.head import HeadMath, score_frozen, score_general

MATHS = [HeadMath(), HeadMath(scale=0.5), HeadMath(softcap=3.0), HeadMath(scale=2.0, softcap=5.0)]


def reference(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, math: HeadMath) -> torch.Tensor:
    return math.apply(hidden @ weight.T).log_softmax(-1).gather(-1, targets)


@pytest.mark.parametrize("math", MATHS)
def test_values_and_gradients_equal_full_logits(math: HeadMath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score, "chunk_rows", lambda vocab: 7)
    torch.manual_seed(0)
    hidden = torch.randn(30, 16)
    weight = torch.randn(VOCAB, 16)
    targets = torch.randint(0, VOCAB, (30, 3))
    mix = torch.randn(30, 3)
    grads = []
    for path in ("full", "frozen", "general"):
        h = hidden.clone().requires_grad_()
        w = weight.clone().requires_grad_(path != "frozen")
        if path == "full":
            logprobs = reference(h, w, targets, math)
            logits = math.apply(hidden @ weight.T)
            entropy = torch.distributions.Categorical(logits=logits).entropy()
        elif path == "frozen":
            logprobs, entropy = score_frozen(h, w, None, targets, math)
        else:
            logprobs, entropy = score_general(h, lambda x, w=w: x @ w.T, VOCAB, targets, math)
        assert not entropy.requires_grad
        (logprobs * mix).sum().backward()
        grads.append((logprobs.detach(), entropy, h.grad, w.grad))
    for other in grads[1:]:
        for expected, got in zip(grads[0], other, strict=True):
            if got is not None:
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_no_tensor_of_tokens_by_vocabulary_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    monkeypatch.setattr(score, "LOGIT_CHUNK_BYTES", 4 * VOCAB * 16)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for item in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(item, torch.Tensor):
                    largest = max(largest, item.numel())
            return out

    hidden = torch.randn(400, 8, requires_grad=True)
    weight = torch.randn(VOCAB, 8)
    targets = torch.randint(0, VOCAB, (400, 1))
    with Watch():
        score_frozen(hidden, weight, None, targets, HeadMath())[0].sum().backward()
    assert largest < 400 * VOCAB // 4


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen3", "gemma3", "gpt2", "granite", "mixtral", "qwen3_moe"])
def test_logprobs_equal_transformers_own(model_of: Callable[[str], Path], kind: str) -> None:
    from transformers import AutoModelForCausalLM

    path = model_of(kind)
    scorer = Scorer(load_base(path))
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tokens = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    targets = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, 5:] = False
    tokens[1, 5:] = 0
    with torch.no_grad():
        logprobs, entropy = scorer(tokens, targets, mask)
        for row, length in ((0, 12), (1, 5)):
            logits = model(input_ids=tokens[row : row + 1, :length]).logits[0].float().log_softmax(-1)
            expected = logits.gather(-1, targets[row, :length, None])[:, 0]
            torch.testing.assert_close(logprobs[row, :length], expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(entropy[row, :length], -(logits.exp() * logits).sum(-1), rtol=1e-4, atol=1e-4)
    assert not logprobs[1, 5:].any()

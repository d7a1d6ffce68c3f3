"""Log-probs of targets and entropies from hidden states and the output head, in chunks of tokens.

Invariant: nothing of size [tokens, vocab] exists for more than one chunk (LOGIT_CHUNK_BYTES of float32 logits),
in forward or backward. With z = logits, p = softmax(z): logp_k = z[target_k] - logsumexp(z), entropy = logsumexp(z) -
sum(p z). The entropy carries no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGIT_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class HeadMath:
    """logits = cap(scale * head(hidden)), cap(z) = softcap * tanh(z / softcap) or the identity."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, raw: Tensor) -> Tensor:
        """Float32 logits from the head's output."""
        logits = raw.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def chunk_rows(vocab: int) -> int:
    """Tokens in one chunk."""
    return max(16, LOGIT_CHUNK_BYTES // (4 * vocab))


def _entropy(logits: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy [chunk] and probabilities [chunk, vocab]."""
    p = torch.exp(logits - lse[:, None])
    return lse - torch.linalg.vecdot(p, logits), p


class _FrozenHead(torch.autograd.Function):
    """The whole head in one node: forward leaves what backward needs as one [tokens, hidden] tensor.

    d logp_k / d hidden = scale * (d_k W[target_k] - sum_v p_v d_v W[v]) with d = 1 - (z / softcap)^2, or 1.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, math: HeadMath
    ) -> tuple[Tensor, Tensor]:
        needed = ctx.needs_input_grad[0]
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        slopes = torch.empty_like(logprobs) if needed and math.softcap is not None else None
        expected = torch.empty_like(hidden) if needed else None
        rows = chunk_rows(weight.shape[0])
        for start in range(0, hidden.shape[0], rows):
            at = slice(start, start + rows)
            logits = math.apply(torch.nn.functional.linear(hidden[at], weight, bias))
            lse = logits.logsumexp(-1)
            chosen = logits.gather(-1, targets[at])
            logprobs[at] = chosen - lse[:, None]
            entropy[at], p = _entropy(logits, lse)
            if expected is not None:
                if slopes is not None and math.softcap is not None:
                    slopes[at] = 1 - (chosen / math.softcap) ** 2
                    p *= 1 - (logits / math.softcap) ** 2
                expected[at] = p.to(weight.dtype) @ weight
        if needed:
            ctx.save_for_backward(weight, targets, expected, slopes)
            ctx.scale = math.scale
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, targets, expected, slopes = ctx.saved_tensors
        grad = grads[0] * ctx.scale
        out = expected * -grad.sum(-1, keepdim=True).to(expected.dtype)
        if slopes is not None:
            grad = grad * slopes
        for k in range(targets.shape[1]):
            out.addcmul_(weight.index_select(0, targets[:, k]), grad[:, k, None].to(weight.dtype))
        return out, None, None, None, None


def score_frozen(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, math: HeadMath
) -> tuple[Tensor, Tensor]:
    """(log-probs float32 [tokens, K], entropy float32 [tokens]) through a head that gets no gradient.

    hidden [tokens, hidden], weight [vocab, hidden], targets int64 [tokens, K].
    """
    result: tuple[Tensor, Tensor] = _FrozenHead.apply(hidden, weight, bias, targets, math)  # type: ignore[no-untyped-call]
    return result


def score_general(
    hidden: Tensor, head: Callable[[Tensor], Tensor], vocab: int, targets: Tensor, math: HeadMath
) -> tuple[Tensor, Tensor]:
    """As `score_frozen`, through any head (trainable or adapted); several chunks are computed again in backward."""

    def chunk(states: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        logits = math.apply(head(states))
        lse = logits.logsumexp(-1)
        with torch.no_grad():
            entropy, _ = _entropy(logits.detach(), lse.detach())
        return logits.gather(-1, chosen) - lse[:, None], entropy

    rows = chunk_rows(vocab)
    parts = []
    # No tokens at all still make one (empty) chunk, so that the graph reaches the head on every rank.
    for start in range(0, max(hidden.shape[0], 1), rows):
        piece = hidden[start : start + rows], targets[start : start + rows]
        # One chunk is within LOGIT_CHUNK_BYTES anyhow: keeping it is cheaper than computing it twice.
        if torch.is_grad_enabled() and hidden.shape[0] > rows:
            parts.append(checkpoint(chunk, *piece, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(chunk(*piece))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

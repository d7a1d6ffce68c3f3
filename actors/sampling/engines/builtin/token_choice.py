"""The choice of the next token by temperature, top-k, top-p and one uniform number per row: pure functions of logits.

Log-probs are those of the full distribution after temperature, `log_softmax(logits / temperature)`, also where top-k or
top-p narrowed the choice: a policy-gradient ratio compares them with the trainer's log-probs, which know no truncation.
At temperature 0 the choice is greedy and the log-prob is that of temperature 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch


class Choice(Protocol):
    """The part of SampleArgs that this module reads."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...


def uniform_stream(seed: int | None, index: int) -> np.random.Generator:
    """Uniform numbers for sample `index` of a request: one is drawn per token.

    Philox is counter-based: each (seed, index) is a stream of its own, the same in every run and whatever else is in
    the batch. Without a seed the stream is fresh entropy.
    """
    if seed is None:
        return np.random.Generator(np.random.Philox())
    return np.random.Generator(np.random.Philox(key=np.array([seed, index], dtype=np.uint64)))


class Chooser:
    """Chooses for a fixed list of rows, so that what depends on their parameters alone is prepared once."""

    def __init__(self, rows: Sequence[Choice], device: torch.device) -> None:
        greedy = [row.temperature == 0 for row in rows]
        # A divisor below the smallest float32 would be 0; with the maximum subtracted first this stays finite.
        tiny = torch.finfo(torch.float32).tiny
        scales = [1.0 if row.temperature == 0 else max(row.temperature, tiny) for row in rows]
        self._scale = None if all(s == 1.0 for s in scales) else torch.tensor(scales, device=device)[:, None]
        self.all_greedy = all(greedy)
        self._greedy = torch.tensor(greedy, device=device) if any(greedy) and not self.all_greedy else None
        cut = [i for i, row in enumerate(rows) if not greedy[i] and (row.top_k > 0 or row.top_p < 1)]
        self._cut = torch.tensor(cut, device=device) if cut else None
        self._top_k = [rows[i].top_k if rows[i].top_k > 0 else 0 for i in cut]
        self._top_p = torch.tensor([rows[i].top_p for i in cut], dtype=torch.float64, device=device)[:, None]

    def __call__(self, logits: torch.Tensor, uniforms: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 [rows] and their log-probs float32 [rows].

        logits: [rows, vocab]; uniforms: float64 [rows] in [0, 1), unused by greedy rows. A row with a NaN logit or
        without a finite one gets a NaN log-prob (and a token without meaning); the other rows are not affected.
        """
        logits = logits.float()
        if self._scale is not None:
            logits = (logits - logits.amax(-1, keepdim=True)) / self._scale
        logp = torch.log_softmax(logits, -1)
        if self.all_greedy:
            tokens = logp.argmax(-1)
        else:
            u = torch.from_numpy(np.asarray(uniforms, dtype=np.float64)).to(logits.device)[:, None]
            tokens = inverse_cdf(logp.exp(), u)[:, 0]
            if self._cut is not None:
                tokens[self._cut] = self._truncated(logp[self._cut], u[self._cut])
            if self._greedy is not None:
                tokens = torch.where(self._greedy, logp.argmax(-1), tokens)
        return tokens, logp.gather(1, tokens[:, None])[:, 0]

    def _truncated(self, logp: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """Choice by u [rows, 1] among the top-k, then among the smallest set whose share reaches top-p: int64 [rows].

        Exactly k tokens stay (ties broken by order), and top-p counts probability after top-k, as transformers does.
        """
        vocab = logp.shape[1]
        if all(self._top_k):
            values, order = logp.topk(min(max(self._top_k), vocab), dim=-1)
        else:
            values, order = logp.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(values.shape[1], device=logp.device)[None]
        limit = torch.tensor([k or vocab for k in self._top_k], device=logp.device)[:, None]
        p = torch.where(rank < limit, values.double().exp(), 0.0)
        p = p / p.sum(-1, keepdim=True)
        # The token that crosses top-p stays, so at least one does: what lies before the first is 0.
        p = torch.where(p.cumsum(-1) - p < self._top_p, p, 0.0)
        return order.gather(1, inverse_cdf(p, u))[:, 0]


def inverse_cdf(p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The index where the running sum of `p` [rows, n] passes each share `u` [rows, k] of its total; int64 [rows, k].

    float64 sums, so that tokens of the tail keep their probability in a large vocabulary. Tokens of probability 0 are
    never chosen: the sum does not move at them.
    """
    cdf = p.cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1:]
    target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target, right=True).clamp_(max=p.shape[1] - 1)

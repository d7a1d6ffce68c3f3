"""What else the model might have said: the likeliest tokens at a position, and the log-probs of tokens that were named.

Log-probs are nats. Of a prompt they are at temperature 1; of a sampled token, of the distribution that it came from.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tinsmith.actors.sampling.engines.builtin.token_choice import inverse_cdf
from tinsmith.bus.protocol.commands import SampleArgs

EMPTY = -99999.0
"""Log-prob in a cell that holds no token."""

TopK = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]
"""Tokens [positions, k] and their log-probs [positions, k], best first."""


def likeliest(logp: torch.Tensor, k: int) -> TopK:
    """The k likeliest tokens of each row of log-probs [positions, vocab]; cells beyond the vocabulary are EMPTY."""
    values, order = logp.topk(min(k, logp.shape[1]), dim=-1)
    tokens = np.zeros((len(logp), k), np.int32)
    logprobs = np.full((len(logp), k), EMPTY, np.float32)
    tokens[:, : order.shape[1]] = order.cpu().numpy()
    logprobs[:, : values.shape[1]] = values.float().cpu().numpy()
    return tokens, logprobs


def of_sampled(logits: torch.Tensor, rows: list[SampleArgs]) -> list[TopK | None]:
    """For each row of logits [rows, vocab] that asked for them, the likeliest tokens [1, k]; else None."""
    found: list[TopK | None] = []
    for row, args in enumerate(rows):
        if not args.topk:
            found.append(None)
            continue
        scaled = logits[row : row + 1].float()
        if args.temperature > 0:
            scaled = (scaled - scaled.amax(-1, keepdim=True)) / args.temperature
        found.append(likeliest(torch.log_softmax(scaled, -1), args.topk))
    return found


class Draws:
    """`count` tokens drawn with replacement at each position from the distribution at `temperature`; 0: the likeliest.

    They depend on `random` alone, not on how many positions are asked for at once.
    """

    def __init__(self, count: int, temperature: float, random: np.random.Generator) -> None:
        self.count = count
        self._temperature = temperature
        self._random = random

    def __call__(self, logp: torch.Tensor) -> TopK:
        """For log-probs [positions, vocab]: tokens int32 and their log-probs (at temperature 1) [positions, count]."""
        if self._temperature == 0:
            tokens = logp.argmax(-1, keepdim=True).expand(len(logp), self.count)
        else:
            uniforms = torch.from_numpy(self._random.random((len(logp), self.count))).to(logp.device)
            scaled = (logp - logp.amax(-1, keepdim=True)) / max(self._temperature, torch.finfo(torch.float32).tiny)
            tokens = inverse_cdf(torch.softmax(scaled, -1), uniforms)
        return tokens.int().cpu().numpy(), logp.gather(1, tokens).float().cpu().numpy()


class PromptExtras:
    """What a request wants to know of its prompt beyond each token's log-prob, filled as the prompt is computed.

    topk: int32 and float32 [n, k], row i of what may stand at position i, row 0 EMPTY; None when k is 0.
    target_logprobs: float32 [n - 1, K] of the tokens `targets` int64 [n - 1, K], row i for position i + 1; NaN where a
    target is -1 (there is no cell) and 0 where it is lower (a cell that asks for nothing); None without targets.
    draws: int32 and float32 [n - 1, draw.count], row i of position i + 1; None when nothing is drawn.
    """

    def __init__(self, length: int, k: int, targets: npt.NDArray[np.int64] | None, draw: Draws | None = None) -> None:
        self._last = length - 1
        self._k = k
        self._targets = targets
        self.topk: TopK | None = None
        if k:
            self.topk = np.zeros((length, k), np.int32), np.full((length, k), EMPTY, np.float32)
        self.target_logprobs = None
        if targets is not None:
            self.target_logprobs = np.where(targets == -1, np.nan, 0.0).astype(np.float32)
        self._draw = draw
        self.draws: TopK | None = None
        if draw is not None:
            shape = (length - 1, draw.count)
            self.draws = np.zeros(shape, np.int32), np.zeros(shape, np.float32)

    def fill(self, logp: torch.Tensor, begin: int) -> None:
        """Take log-probs [positions, vocab] that positions `begin` and on give of the token after each."""
        end = min(begin + len(logp), self._last)
        if end <= begin:
            return
        logp = logp[: end - begin]
        if self.topk is not None:
            tokens, logprobs = likeliest(logp, self._k)
            self.topk[0][begin + 1 : end + 1] = tokens
            self.topk[1][begin + 1 : end + 1] = logprobs
        if self._targets is not None and self.target_logprobs is not None:
            targets = self._targets[begin:end]
            index = torch.from_numpy(np.maximum(targets, 0)).to(logp.device)
            asked, scores = targets >= 0, logp.gather(1, index).float().cpu().numpy()
            self.target_logprobs[begin:end][asked] = scores[asked]
        if self._draw is not None and self.draws is not None:
            self.draws[0][begin:end], self.draws[1][begin:end] = self._draw(logp)


def last_only(rows: npt.NDArray[np.float32], n: int | None, blank: float) -> npt.NDArray[np.float32]:
    """The same array with all but the last `n` rows blank; None leaves it as it is."""
    if n is None or n >= len(rows):
        return rows
    shortened = np.full_like(rows, blank)
    shortened[len(rows) - n :] = rows[len(rows) - n :]
    return shortened

"""Prompts on their way into the cache: several in one padded batch, long ones chunk by chunk, equal ones only once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from tinsmith.actors.sampling.engines.builtin.alternatives import PromptExtras
from tinsmith.actors.sampling.engines.builtin.kv_cache import KeyValue, PromptCache
from tinsmith.actors.sampling.engines.builtin.sample import LogProbs, PromptKey, Sample, Tokens
from tinsmith.actors.sampling.engines.builtin.versions import PublishedAdapter

_LOGIT_BYTES = 1 << 26
"""Logits of all positions, which prompt log-probs need, are never held for more than this at once."""
_SLACK = 512
"""A batch of no more padded tokens than this costs about as much as its longest prompt alone."""

Forward = Callable[..., torch.Tensor]
"""(tokens [rows, n], offset, cache, adapters per row, positions [rows] or None for all)
-> logits [rows, 1 or n, vocab]."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prefilled prompt: keys and values per layer, logits [vocab] after its last token, log-probs when asked for."""

    key: PromptKey
    length: int
    layers_kv: list[KeyValue]
    logits: torch.Tensor
    logprobs: LogProbs | None
    extras: PromptExtras | None = None


class PromptStore:
    """Prefilled prompts by key: the most recently used ones, up to so many tokens."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._held: OrderedDict[PromptKey, Prompt] = OrderedDict()

    def get(self, key: PromptKey, with_logprobs: bool) -> Prompt | None:
        """The prompt, unless it was never prefilled, has left, or lacks the log-probs that are wanted."""
        prompt = self._held.get(key)
        if prompt is None or (with_logprobs and prompt.logprobs is None):
            return None
        self._held.move_to_end(key)
        return prompt

    def add(self, prompts: Iterable[Prompt]) -> None:
        """Hold these too, however long they are: samples are about to start from them."""
        for prompt in prompts:
            self._held[prompt.key] = prompt
            self._held.move_to_end(prompt.key)

    def trim(self) -> None:
        """Drop least recently used prompts until the rest is within the bound."""
        total = self.tokens
        while total > self._max_tokens:
            total -= self._held.popitem(last=False)[1].length

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return sum(prompt.length for prompt in self._held.values())


class Prefill:
    """One batch of distinct prompts, advanced by a chunk of tokens at a time."""

    def __init__(self, samples: list[Sample], *, vocab_size: int, chunk_tokens: int, device: torch.device) -> None:
        self._keys = [sample.key for sample in samples]
        self._contexts: list[Tokens] = [sample.context for sample in samples]
        self.adapters: list[PublishedAdapter | None] = [sample.job.adapter for sample in samples]
        self._with_logprobs = samples[0].wants_prompt_logprobs
        self._extras = [sample.extras() for sample in samples]
        longest = max(len(context) for context in self._contexts)
        # One column more than the longest, so that the target of a chunk's last token can always be read.
        padded = np.zeros((len(samples), longest + 1), dtype=np.int64)
        for row, context in zip(padded, self._contexts, strict=True):
            row[: len(context)] = context
        self._tokens = torch.from_numpy(padded).to(device)
        self._longest = longest
        limit = max(1, chunk_tokens // len(samples))
        if self._with_logprobs:
            limit = max(1, min(limit, _LOGIT_BYTES // (4 * vocab_size * len(samples))))
        self._chunk = limit
        self._offset = 0
        self._cache = PromptCache(longest)
        self._logits: list[torch.Tensor | None] = [None] * len(samples)
        self._logprobs = np.full((len(samples), longest), np.nan, dtype=np.float32) if self._with_logprobs else None

    @property
    def next_tokens(self) -> int:
        """Padded tokens that the next `advance` computes."""
        return len(self._keys) * min(self._chunk, self._longest - self._offset)

    def advance(self, forward: Forward) -> list[Prompt]:
        """Compute one chunk; returns all prompts when it was the last, else nothing."""
        begin, end = self._offset, min(self._offset + self._chunk, self._longest)
        last = [len(context) - 1 for context in self._contexts]
        self._cache.begin(begin)
        tokens = self._tokens[:, begin:end]
        if self._with_logprobs:
            logits = forward(tokens, begin, self._cache, self.adapters, None).float()
            self._score(logits, begin, end)
        else:
            # Rows that end elsewhere give a position of no meaning: each row keeps its place in the batch.
            at = torch.tensor([min(max(i, begin), end - 1) - begin for i in last], device=tokens.device)
            logits = forward(tokens, begin, self._cache, self.adapters, at)
        for row, position in enumerate(last):
            if begin <= position < end:
                self._logits[row] = logits[row, position - begin if self._with_logprobs else 0].clone()
        self._offset = end
        return self._prompts() if end == self._longest else []

    def _score(self, logits: torch.Tensor, begin: int, end: int) -> None:
        """Log-prob of each token under the logits of the one before it."""
        assert self._logprobs is not None
        targets = self._tokens[:, begin + 1 : end + 1, None]
        logp = torch.log_softmax(logits, -1)
        scores = logp.gather(2, targets)[..., 0].cpu().numpy()
        stop = min(end + 1, self._longest)
        self._logprobs[:, begin + 1 : stop] = scores[:, : stop - begin - 1]
        for row, extras in enumerate(self._extras):
            if extras is not None:
                extras.fill(logp[row], begin)

    def _prompts(self) -> list[Prompt]:
        prompts = []
        for row, (key, context) in enumerate(zip(self._keys, self._contexts, strict=True)):
            logits = self._logits[row]
            assert logits is not None
            scores = None if self._logprobs is None else self._logprobs[row, : len(context)].copy()
            layers = self._cache.row(row, len(context))
            prompts.append(Prompt(key, len(context), layers, logits, scores, self._extras[row]))
        return prompts


def choose_batch(samples: list[Sample], token_budget: int) -> list[Sample]:
    """Which of the waiting samples (in order of arrival, all without their prompt) form the next prefill batch.

    One sample per distinct prompt; the first is always in; the others join, nearest in length first, while the padded
    tokens stay within the budget and little of them is padding. All of a batch want prompt log-probs or none does.
    """
    first = samples[0]
    distinct: dict[PromptKey, Sample] = {}
    for sample in samples:
        if sample.wants_prompt_logprobs == first.wants_prompt_logprobs:
            distinct.setdefault(sample.key, sample)
    others = sorted((s for s in distinct.values() if s is not first), key=lambda s: abs(s.length - first.length))
    batch, longest, real = [first], first.length, first.length
    for sample in others:
        padded = (len(batch) + 1) * max(longest, sample.length)
        if padded > token_budget or padded > max(1.3 * (real + sample.length), _SLACK):
            break
        batch.append(sample)
        longest, real = max(longest, sample.length), real + sample.length
    return batch

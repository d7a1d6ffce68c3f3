"""The generator: continuous batching over one causal language model and the adapters published for it.

Requests join and leave between tokens. Each `step` prefills what has room to start (equal prompts once), then decodes
one token for every live row, each row under its own version. Pull-based and single-threaded: the owner calls `step`
while `busy`.

What a row gets does not depend on its neighbours, with one reservation: floating-point sums may round differently in
batches of different size, so logits agree to about 1e-5 and a seeded choice can differ where it falls on such a border.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tinsmith.actors.sampling.engines.builtin.alternatives import TopK, of_sampled
from tinsmith.actors.sampling.engines.builtin.kv_cache import SlotCache
from tinsmith.actors.sampling.engines.builtin.model_pass import ModelPass, rows_of
from tinsmith.actors.sampling.engines.builtin.prefill import Prefill, Prompt, PromptStore, choose_batch
from tinsmith.actors.sampling.engines.builtin.sample import (
    Failed,
    Finished,
    Job,
    Limits,
    Sample,
    SampleRequest,
    end_tokens,
)
from tinsmith.actors.sampling.engines.builtin.token_choice import Chooser
from tinsmith.actors.sampling.engines.builtin.versions import Versions
from tinsmith.bus.protocol.errors import InvalidInput, NonFinite, TinsmithError, UnknownVersion
from tinsmith.bus.protocol.parts import Part


def _no_versions(key: str) -> Path:
    raise UnknownVersion(f"no version {key!r} is published", remedy="Sample from 'base'.", field="version")


class Generator:
    """Samples from `model`, a transformers causal LM in eval mode, whole on one device; `tokenizer` may be None.

    locate: the directory of a version's key (raises UnknownVersion itself, or names a directory that does not exist).
    max_rows: sequences decoded together. max_cache_tokens: bound on live rows times the longest of them; beyond it
    the youngest row goes back to the queue and is resumed later. prefill_tokens: padded prompt tokens computed between
    two decode steps. shared_tokens: prompts kept for later requests with the same one.
    max_adapters, max_adapter_bytes: adapters kept in memory.

    Raises UnsupportedModel for a model whose layers don't keep plain keys and values of all tokens.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        locate: Callable[[str], Path] = _no_versions,
        max_rows: int = 32,
        max_cache_tokens: int = 1 << 17,
        prefill_tokens: int = 2048,
        shared_tokens: int = 4096,
        max_adapters: int = 64,
        max_adapter_bytes: int = 1 << 31,
    ) -> None:
        self._pass = ModelPass(model)
        self._device = self._pass.device
        context = min(self._pass.context, max_cache_tokens)
        self._limits = Limits(context, self._pass.vocab_size, end_tokens(model), tokenizer)
        self._max_rows, self._max_cache_tokens = max_rows, max_cache_tokens
        self._prefill_tokens = prefill_tokens
        self._versions = Versions(model, locate, max_count=max_adapters, max_bytes=max_adapter_bytes)
        self._jobs: dict[str, Job] = {}
        self._waiting: deque[Sample] = deque()
        self._live: list[Sample] = []
        self._started = 0
        self._slots = SlotCache()
        self._store = PromptStore(shared_tokens)
        self._prefill: Prefill | None = None
        self._ended: list[Finished | Failed] = []
        self._batch: _Batch | None = None

    def submit(self, request: SampleRequest) -> None:
        """Queue a request; its answer comes from a later `step`.

        Raises, with nothing queued: InvalidInput (also for an id that is under way), SequenceTooLong, UnknownVersion.
        """
        if request.id in self._jobs:
            raise InvalidInput("a request of that id is under way", remedy="Give each request its own id.", field="id")
        samples = self._limits.open(request)
        self._versions.check(request.version)
        self._jobs[request.id] = samples[0].job
        self._waiting.extend(samples)

    @torch.inference_mode()
    def cancel(self, id: str) -> bool:
        """Forget a request and free its rows; False when it is not under way. It gets no answer."""
        if id not in self._jobs:
            return False
        self._drop(id)
        return True

    def parts(self, id: str) -> list[Part]:
        """What a streamed request that is under way has sampled since the last call."""
        job = self._jobs.get(id)
        if job is None:
            return []
        fresh, job.parts = job.parts, []
        return fresh

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do or to answer."""
        return bool(self._waiting or self._live or self._ended)

    @property
    def live_rows(self) -> int:
        """Sequences that are decoding."""
        return len(self._live)

    @property
    def waiting_samples(self) -> int:
        """Sequences that wait for a row."""
        return len(self._waiting)

    @property
    def shared_tokens(self) -> int:
        """Prompt tokens kept for later requests."""
        return self._store.tokens

    @property
    def cache_bytes(self) -> int:
        """Memory of the live rows' keys and values."""
        return self._slots.nbytes

    def close(self) -> None:
        """Take the hooks off the model, which is then as it was."""
        self._pass.close()

    @torch.inference_mode()
    def step(self) -> list[Finished | Failed]:
        """Prefill some, decode one token for every live row; returns the requests that ended."""
        try:
            self._admit()
            if self._live:
                self._decode()
        except Exception:
            # The owner gives up what is under way; what was begun for it must not be tried again and again.
            self._prefill, self._ended = None, []
            raise
        if not self._waiting:
            self._prefill = None
        if not self._live:
            self._slots.clear()
        ended, self._ended = self._ended, []
        return ended

    def _admit(self) -> None:
        """Prefill prompts of the samples that have room, within the step's budget, and start those that are ready."""
        spent = 0
        while True:
            picks = self._picks()
            missing = [sample for sample in picks if self._prompt(sample) is None]
            if self._prefill is None:
                if not missing:
                    break
                self._prefill = Prefill(
                    choose_batch(missing, self._prefill_tokens),
                    vocab_size=self._pass.vocab_size,
                    chunk_tokens=self._prefill_tokens,
                    device=self._device,
                )
            if spent and spent + self._prefill.next_tokens > self._prefill_tokens:
                break
            spent += self._prefill.next_tokens
            prompts = self._prefill.advance(self._pass.prompt)
            if prompts:
                self._store.add(prompts)
                self._prefill = None
        ready = [(sample, prompt) for sample in picks if (prompt := self._prompt(sample)) is not None]
        if ready:
            self._start(ready)
        self._store.trim()

    def _picks(self) -> list[Sample]:
        """The samples at the head of the queue that there is room for, their adapters loaded."""
        picks: list[Sample] = []
        longest = max((sample.length for sample in self._live), default=0)
        for sample in self._waiting:
            rows = len(self._live) + len(picks) + 1
            longest = max(longest, sample.length)
            if rows > self._max_rows or (rows > 1 and rows * SlotCache.columns(longest + 1) > self._max_cache_tokens):
                break
            job = sample.job
            if job.request.id not in self._jobs:
                continue
            if not job.loaded:
                try:
                    job.adapter, job.loaded = self._versions.get(job.request.version), True
                except TinsmithError as error:
                    self._fail(job, error)
                    continue
            if job.cached_tokens is None:
                job.cached_tokens = 0 if self._prompt(sample) is None else sample.length
            picks.append(sample)
        return picks

    def _prompt(self, sample: Sample) -> Prompt | None:
        return self._store.get(sample.key, sample.wants_prompt_logprobs)

    def _start(self, ready: list[tuple[Sample, Prompt]]) -> None:
        """Choose the first token of each sample from its prompt's logits, and give those that go on a row."""
        chooser = Chooser([sample.job.request.args for sample, _ in ready], self._device)
        uniforms = np.array([sample.random.random() for sample, _ in ready])
        logits = torch.stack([prompt.logits for _, prompt in ready])
        tokens, logprobs = chooser(logits, uniforms)
        topk = of_sampled(logits, [sample.job.request.args for sample, _ in ready])
        started = {id(sample) for sample, _ in ready}
        self._waiting = deque(sample for sample in self._waiting if id(sample) not in started)
        chosen = zip(ready, tokens.tolist(), logprobs.tolist(), topk, strict=True)
        for (sample, prompt), token, logprob, alternatives in chosen:
            if sample.wants_prompt_logprobs:
                sample.job.prompt_logprobs, sample.job.extras = prompt.logprobs, prompt.extras
            if self._take(sample, token, logprob, alternatives):
                continue
            longest = max((live.length - 1 for live in self._live), default=0)
            self._slots.place(len(self._live), prompt.layers_kv, live=longest, most=self._max_rows)
            self._live.append(sample)
            self._started += 1
            sample.started = self._started
            self._batch = None

    def _decode(self) -> None:
        """One token for every live row."""
        longest = max(sample.length for sample in self._live)
        while len(self._live) > 1 and len(self._live) * SlotCache.columns(longest) > self._max_cache_tokens:
            self._pause_youngest()
            longest = max(sample.length for sample in self._live)
        self._slots.reserve(len(self._live), longest)
        batch = self._batch
        if batch is None:
            batch = self._batch = _Batch(self._live, self._device)
        shortest = min(sample.length for sample in self._live)
        self._slots.begin(batch.positions, shortest - 1, longest - 1)
        logits = self._pass.decode(batch.tokens, batch.positions, self._slots, batch.groups)
        uniforms = np.array([sample.random.random() for sample in self._live])
        tokens, logprobs = batch.chooser(logits, uniforms)
        topk = of_sampled(logits, [sample.job.request.args for sample in self._live])
        batch.advance(tokens)
        chosen = list(zip(list(self._live), tokens.tolist(), logprobs.tolist(), topk, strict=True))
        self._leave([sample for sample, *said in chosen if self._take(sample, *said)])

    def _take(self, sample: Sample, token: int, logprob: float, topk: TopK | None) -> bool:
        """Record a token; True when the sample is over, by itself or because its request failed."""
        job = sample.job
        if self._jobs.get(job.request.id) is not job:
            return True
        if not math.isfinite(logprob):
            self._fail(job, NonFinite("the model's logits are not finite", remedy="Sample from an earlier version."))
            return True
        if not sample.take(token, logprob, topk):
            return False
        if (result := job.result()) is not None:
            del self._jobs[job.request.id]
            self._ended.append(result)
        return True

    def _leave(self, over: list[Sample]) -> None:
        """Free rows; the last row moves into each gap, so that live rows stay the first ones."""
        for sample in over:
            if sample not in self._live:
                continue
            gap, last = self._live.index(sample), self._live.pop()
            if last is not sample:
                # All but the newest token of a live row have keys and values.
                self._slots.move(len(self._live), gap, last.length - 1)
                self._live[gap] = last
            self._batch = None

    def _pause_youngest(self) -> None:
        youngest = max(self._live, key=lambda sample: sample.started)
        self._leave([youngest])
        youngest.pause()
        self._waiting.appendleft(youngest)

    def _drop(self, id: str) -> None:
        job = self._jobs.pop(id)
        self._waiting = deque(sample for sample in self._waiting if sample.job is not job)
        self._leave([sample for sample in self._live if sample.job is job])

    def _fail(self, job: Job, error: TinsmithError) -> None:
        self._drop(job.request.id)
        self._ended.append(Failed(job.request.id, error))


class _Batch:
    """The live rows as tensors; valid until a row joins or leaves."""

    def __init__(self, samples: list[Sample], device: torch.device) -> None:
        self.tokens = torch.tensor([sample.tokens[-1] for sample in samples], device=device)
        self.positions = torch.tensor([sample.length - 1 for sample in samples], device=device)
        self.chooser = Chooser([sample.job.request.args for sample in samples], device)
        self.groups = rows_of([sample.job.adapter for sample in samples], device)

    def advance(self, tokens: torch.Tensor) -> None:
        """The chosen tokens int64 [rows] are the next inputs."""
        self.tokens = tokens
        # A new tensor: the cache still refers to the old one.
        self.positions = self.positions + 1

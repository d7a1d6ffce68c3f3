"""What is asked of the generator and what it answers, with the state of each sample between the two."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tinsmith.actors.sampling.engines.builtin.alternatives import Draws, PromptExtras, TopK
from tinsmith.actors.sampling.engines.builtin.stopping import StopReason, StopRule, VisibleText
from tinsmith.actors.sampling.engines.builtin.token_choice import uniform_stream
from tinsmith.actors.sampling.engines.builtin.versions import BASE, PublishedAdapter
from tinsmith.bus.protocol.commands import SampleArgs
from tinsmith.bus.protocol.errors import InvalidInput, SequenceTooLong, TinsmithError
from tinsmith.bus.protocol.parts import Part

Tokens = npt.NDArray[np.int32]
LogProbs = npt.NDArray[np.float32]


@dataclass(frozen=True)
class SampleRequest:
    """Continue `prompt` int32 [n] as `args` say, with the weights of `version` (a key of the generator's versions).

    `args.version` is the name that the client gave; `version` is what the owner made of it.
    """

    id: str
    prompt: Tokens
    args: SampleArgs
    version: str = BASE
    targets: npt.NDArray[np.int64] | None = None
    """[n - 1, K]: tokens whose log-probs at prompt positions 1 and on are wanted; negative ones are not."""


@dataclass(frozen=True)
class GeneratedSequence:
    """One continuation: tokens int32 [m] with the stop token, log-probs float32 [m] of the distribution sampled from
    (after temperature, before top-k and top-p), and the text before the stop token or stop string."""

    tokens: Tokens
    logprobs: LogProbs
    stop_reason: StopReason
    text: str
    topk: TopK | None = None
    """[m, k], where it was asked for."""


@dataclass(frozen=True)
class Finished:
    """All samples of a request. prompt_logprobs: float32 [n] at temperature 1, NaN first; None when not asked for.

    cached_tokens: prompt tokens that an earlier request with the same prompt had computed already.
    """

    id: str
    sequences: tuple[GeneratedSequence, ...]
    prompt_logprobs: LogProbs | None
    version: str
    cached_tokens: int = 0
    extras: PromptExtras | None = None
    parts: tuple[Part, ...] = ()
    """The last ones of a streamed request."""


@dataclass(frozen=True)
class Failed:
    """A request that ended with an error; the others are not affected."""

    id: str
    error: TinsmithError


@dataclass(eq=False)
class Job:
    """A request under way: its samples' results by index."""

    request: SampleRequest
    adapter: PublishedAdapter | None = None
    loaded: bool = False
    cached_tokens: int | None = None
    prompt_logprobs: LogProbs | None = None
    extras: PromptExtras | None = None
    done: dict[int, GeneratedSequence] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    """What was sampled since it was last asked for, of a request that is streamed."""

    def result(self) -> Finished | None:
        """The answer once every sample has ended."""
        args = self.request.args
        if len(self.done) < args.n:
            return None
        return Finished(
            self.request.id,
            tuple(self.done[i] for i in range(args.n)),
            self.prompt_logprobs if args.prompt_logprobs else None,
            self.request.version,
            self.cached_tokens or 0,
            self.extras,
            tuple(self.parts),
        )


_DRAWS = 2**63
"""Number of the stream of uniform numbers that draws for the prompt: above those of all samples."""
PromptKey = tuple[str, bytes, bytes]
"""Version and token bytes of a prompt, and what is asked of it beyond: what may share one prefill."""


@dataclass(eq=False)
class Sample:
    """One continuation in the making. Its uniform numbers and stop state live here, so that it can pause and resume."""

    job: Job
    index: int
    rule: StopRule
    visible: VisibleText | None
    """Of a request that is streamed, where there is a tokenizer."""
    random: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[TopK] = field(default_factory=list)
    started: int = -1
    """Order in which it got its row."""

    @property
    def length(self) -> int:
        """Prompt and continuation so far, tokens."""
        return len(self.job.request.prompt) + len(self.tokens)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether its prefill must give log-probs of the prompt."""
        wanted = self.job.request.args.prompt_logprobs or self._wants_extras
        return wanted and self.job.prompt_logprobs is None

    @property
    def _wants_extras(self) -> bool:
        request = self.job.request
        return request.args.prompt_topk > 0 or request.args.prompt_draws > 0 or request.targets is not None

    def extras(self) -> PromptExtras | None:
        """What its prefill must tell of the prompt beyond log-probs, still empty; None for nothing (more)."""
        if not self._wants_extras or self.job.extras is not None:
            return None
        request = self.job.request
        args, draw = request.args, None
        if args.prompt_draws:
            draw = Draws(args.prompt_draws, args.temperature, uniform_stream(args.seed, _DRAWS))
        return PromptExtras(len(request.prompt), args.prompt_topk, request.targets, draw)

    @cached_property
    def context(self) -> Tokens:
        """The tokens to prefill: the prompt, and after a pause what was sampled before it."""
        return np.concatenate([self.job.request.prompt, np.asarray(self.tokens, dtype=np.int32)])

    @cached_property
    def key(self) -> PromptKey:
        """What its prefill is found by."""
        request, extras = self.job.request, b""
        if self._wants_extras and self.job.extras is None:
            args = request.args
            # Draws without a seed are nobody else's.
            drawn = (args.prompt_draws, args.temperature, request.id if args.seed is None else args.seed)
            extras = f"{args.prompt_topk}:{drawn if args.prompt_draws else ''}:".encode()
            extras += request.targets.tobytes() if request.targets is not None else b""
        return request.version, self.context.tobytes(), extras

    def pause(self) -> None:
        """Back to the queue: its context is now longer than when it began."""
        del self.context, self.key

    def take(self, token: int, logprob: float, topk: TopK | None = None) -> bool:
        """Append a token, and the likeliest ones [1, k] in its place; True when it was the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if topk is not None:
            self.topk.append(topk)
        reason = self.rule.after(token)
        text = self.rule.text(self.tokens) if reason is not None else ""
        if self.job.request.args.stream:
            self.job.parts.append(self._part(token, logprob, topk, reason, text))
        if reason is None:
            return False
        self.job.done[self.index] = GeneratedSequence(
            np.asarray(self.tokens, dtype=np.int32),
            np.asarray(self.logprobs, dtype=np.float32),
            reason,
            text,
            (np.concatenate([t for t, _ in self.topk]), np.concatenate([p for _, p in self.topk]))
            if self.topk
            else None,
        )
        return True

    def _part(self, token: int, logprob: float, topk: TopK | None, reason: StopReason | None, text: str) -> Part:
        fresh = ""
        if self.visible is not None:
            fresh = self.visible.rest(text) if reason is not None else self.visible.feed(token)
        likeliest = None
        if topk is not None:
            likeliest = [[[float(t), float(p)] for t, p in zip(topk[0][0], topk[1][0], strict=True)]]
        return Part(self.index, len(self.tokens) - 1, [token], [logprob], fresh, reason, likeliest)


def end_tokens(model: Any) -> frozenset[int]:
    """The model's own end tokens: those of its generation config, else of its config."""
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        end = getattr(config, "eos_token_id", None)
        if end is not None:
            return frozenset([end] if isinstance(end, int) else end)
    return frozenset()


@dataclass(frozen=True)
class Limits:
    """What a request is checked against."""

    context: int
    vocab_size: int
    end_tokens: frozenset[int]
    tokenizer: Any

    def open(self, request: SampleRequest) -> list[Sample]:
        """The samples of a valid request.

        Raises SequenceTooLong when prompt and max_tokens exceed the context, InvalidInput for an empty prompt, a token
        outside the vocabulary, or stop strings that can't be looked for.
        """
        args = request.args
        prompt = np.asarray(request.prompt)
        if prompt.ndim != 1 or prompt.size == 0 or not np.issubdtype(prompt.dtype, np.integer):
            raise InvalidInput("the prompt must be a list of tokens", remedy="Send at least one token.", field="prompt")
        self._in_vocabulary(prompt, "prompt")
        if request.targets is not None:
            self._check_targets(request.targets, prompt.size)
        if prompt.size + args.max_tokens > self.context:
            raise SequenceTooLong(
                f"{prompt.size} prompt tokens and max_tokens {args.max_tokens} are {prompt.size + args.max_tokens} "
                f"tokens; the limit is {self.context}",
                remedy="Shorten the prompt or lower max_tokens.",
                field="max_tokens",
            )
        if args.stop_tokens:
            self._in_vocabulary(np.asarray(args.stop_tokens), "stop_tokens")
        if args.stop_strings and self.tokenizer is None:
            raise InvalidInput(
                "this model has no tokenizer to look for stop strings with",
                remedy="Use stop_tokens.",
                field="stop_strings",
            )
        if "" in args.stop_strings:
            raise InvalidInput("a stop string is empty", remedy="Leave it out.", field="stop_strings")
        stop_tokens = self.end_tokens if args.stop_tokens is None else frozenset(args.stop_tokens)
        tail = [int(token) for token in prompt[-8:]]
        job = Job(replace(request, prompt=prompt.astype(np.int32)))

        def rule() -> StopRule:
            return StopRule(
                self.tokenizer,
                tail,
                stop_tokens=stop_tokens,
                stop_strings=args.stop_strings,
                max_tokens=args.max_tokens,
            )

        def visible() -> VisibleText | None:
            shown = args.stream and self.tokenizer is not None
            return VisibleText(self.tokenizer, tail, args.stop_strings) if shown else None

        return [Sample(job, i, rule(), visible(), uniform_stream(args.seed, i)) for i in range(args.n)]

    def _check_targets(self, targets: npt.NDArray[np.int64], length: int) -> None:
        if targets.dtype != np.int64 or targets.ndim != 2 or len(targets) != length - 1:
            raise InvalidInput(
                f"shape {list(targets.shape)} and dtype {targets.dtype}, expected int64 [{length - 1}, K]",
                remedy="Send one row for each prompt token but the first; -1 asks for nothing.",
                field="targets",
            )
        self._in_vocabulary(np.maximum(targets.ravel(), 0), "targets")

    def _in_vocabulary(self, tokens: npt.NDArray[Any], name: str) -> None:
        wrong = np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))
        if wrong.size:
            raise InvalidInput(
                f"token {int(tokens[wrong[0]])} at position {int(wrong[0])} is outside the vocabulary of "
                f"{self.vocab_size} tokens",
                remedy="Use the tokenizer of this model.",
                field=name,
            )

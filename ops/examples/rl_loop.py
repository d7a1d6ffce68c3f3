"""Reinforcement learning that is driven by events: each new published version of the weights starts the next rollout.

    version published -> sample groups of answers -> verify -> forward_backward, optim_step, publish -> published ...

The three commands of a step are enqueued at once and in order; what came of them is read from the model's events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinsmith.api import Client, Datum, Model, SampledSequence, TinsmithError


@dataclass(frozen=True)
class Problem:
    """A prompt, and the one answer that the verifier takes."""

    prompt: str
    answer: str

    def reward(self, sample: SampledSequence) -> float:
        """1 when the sample ended by itself and its text is the answer, else 0."""
        return float(sample.stop_reason == "stop" and sample.text.strip() == self.answer)


@dataclass(frozen=True)
class Recipe:
    """How to sample and how to train."""

    steps: int
    problems_per_step: int
    samples_per_problem: int
    max_tokens: int
    lr: float
    loss: str = "importance_sampling"
    stop: tuple[str, ...] = ("\n",)
    seed: int = 0


@dataclass
class Iteration:
    """What one step did. tokens: trained on, prompts included; seconds: all of the step, sampling included."""

    number: int
    reward: float
    started: float
    loss: float = float("nan")
    grad_norm: float = float("nan")
    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens by the seconds of the whole step."""
        return self.tokens / self.seconds


async def train(
    client: Client, model: Model, tokenizer: Any, problems: Sequence[Problem], recipe: Recipe
) -> AsyncIterator[Iteration]:
    """Run the recipe; gives each step as soon as its new weights can be sampled. Raises what a command failed with."""
    random = np.random.default_rng(recipe.seed)
    start = await model.publish("rl-0")
    step = None
    async for seen in client.events([model.name], since="0"):
        if isinstance(seen, TinsmithError):
            raise seen  # A gap: events were dropped before they were read.
        event = seen.event
        if event.seq < start.event.seq:
            continue  # From before this run.
        if not event.ok:
            raise TinsmithError.from_wire(event.error or {})
        if event.kind == "forward_backward" and step is not None:
            step.loss, step.tokens = event.metrics["loss:mean"], event.metrics["tokens:sum"]
        elif event.kind == "optim_step" and step is not None:
            step.grad_norm = event.metrics["grad_norm"]
        elif event.kind == "publish":
            if step is not None:
                step.seconds = time.monotonic() - step.started
                yield step
            number = 1 if step is None else step.number + 1
            if number > recipe.steps:
                return
            started = time.monotonic()
            chosen = [problems[i] for i in random.choice(len(problems), recipe.problems_per_step, replace=False)]
            data, reward = await rollout(client, event.result["version"], tokenizer, chosen, recipe, number)
            step = Iteration(number, reward, started)
            model.forward_backward(data, recipe.loss)
            model.optim_step(lr=recipe.lr)
            model.publish(f"rl-{number}")


async def rollout(
    client: Client, version: str, tokenizer: Any, problems: Sequence[Problem], recipe: Recipe, number: int
) -> tuple[list[Datum], float]:
    """A group of answers to each problem from `version`: as data to train on, and their mean reward."""
    prompts = [tokenizer.encode(problem.prompt) for problem in problems]
    groups = await sample(client, version, prompts, recipe, recipe.samples_per_problem, seed=number << 32)
    data, rewards = [], []
    for problem, prompt, group in zip(problems, prompts, groups, strict=True):
        scores = np.array([problem.reward(answer) for answer in group])
        # Against the group's own mean, so that an answer is pushed as far as it is better than its siblings.
        advantages = scores - scores.mean()
        data += [to_datum(prompt, answer, float(a)) for answer, a in zip(group, advantages, strict=True)]
        rewards.append(scores.mean())
    return data, float(np.mean(rewards))


async def sample(
    client: Client, version: str, prompts: Sequence[list[int]], recipe: Recipe, n: int, seed: int
) -> list[Sequence[SampledSequence]]:
    """`n` answers to each prompt; all prompts are in flight at once."""
    pending = [
        client.sample(p, version=version, n=n, max_tokens=recipe.max_tokens, stop=recipe.stop, seed=seed + i)
        for i, p in enumerate(prompts)
    ]
    return [result.sequences for result in await asyncio.gather(*pending)]


def to_datum(prompt: list[int], answer: SampledSequence, advantage: float) -> Datum:
    """Position i predicts token i + 1 of prompt and answer; the positions that predict the answer bear the loss."""
    tokens = np.concatenate([prompt, answer.tokens])
    before = np.zeros(len(prompt) - 1)
    inputs = {
        "target_tokens": tokens[1:],
        "logprobs": np.concatenate([before, answer.logprobs]),
        "advantages": np.concatenate([before, np.full(len(answer.tokens), advantage)]),
        # Without it, answers of advantage 0 would not count in entropy, KL and the other means.
        "mask": np.concatenate([before, np.ones(len(answer.tokens))]),
    }
    return Datum(tokens[:-1], inputs)


async def evaluate(
    client: Client, version: str, tokenizer: Any, problems: Sequence[Problem], recipe: Recipe, n: int = 8
) -> float:
    """Mean reward of `n` answers to each problem; the same seeds each time, so that two versions compare."""
    prompts = [tokenizer.encode(problem.prompt) for problem in problems]
    groups = await sample(client, version, prompts, recipe, n, seed=1 << 60)
    pairs = zip(problems, groups, strict=True)
    return float(np.mean([problem.reward(answer) for problem, group in pairs for answer in group]))

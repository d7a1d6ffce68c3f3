"""The two tasks of the demo: what is asked, what is right, and the settings with which it is learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tinsmith.ops.examples.rl_loop import Problem, Recipe


@dataclass(frozen=True)
class Lessons:
    """A supervised phase before RL: batches of (prompt, completion), and its learning rate."""

    batches: Sequence[Sequence[tuple[str, str]]]
    lr: float


@dataclass(frozen=True)
class Task:
    """Problems to train on, others that only measure, and how to train."""

    about: str
    problems: Sequence[Problem]
    held_out: Sequence[Problem]
    recipe: Recipe
    lora_rank: int
    lora_alpha: float
    unembed: bool = False
    lessons: Lessons | None = None


def sums(steps: int | None = None, seed: int = 0) -> Task:
    """Sums of two digits after two worked examples: a small instruct model gets about half of them right."""
    problems = [Problem(f"1 + 1 = 2\n2 + 3 = 5\n{a} + {b} =", str(a + b)) for a in range(10) for b in range(10)]
    train, held_out = _split(problems)
    recipe = Recipe(steps=steps or 10, problems_per_step=8, samples_per_problem=8, max_tokens=4, lr=2e-4, seed=seed)
    return Task("add two digits", train, held_out, recipe, lora_rank=16, lora_alpha=32.0)


def reversals(steps: int | None = None, seed: int = 0) -> Task:
    """Two digits in reverse order, for a model that starts as noise.

    Its lessons show the right digits, but more than half of them in a form that the verifier does not take: so the
    supervised phase ends half-way, and reinforcement has something to settle.
    """
    problems = [Problem(f"{n:02d}>", f"{n:02d}"[::-1]) for n in range(100)]
    train, held_out = _split(problems)
    random = np.random.default_rng(seed)
    batches = []
    for _ in range(80):
        picks = [train[i] for i in random.integers(len(train), size=64)]
        forms = np.where(random.random(64) < 0.6, "=", "")
        batches.append([(p.prompt, f"{form}{p.answer}\n") for p, form in zip(picks, forms, strict=True)])
    recipe = Recipe(steps=steps or 20, problems_per_step=16, samples_per_problem=8, max_tokens=4, lr=1.5e-3, seed=seed)
    lessons = Lessons(batches, lr=3e-3)
    return Task(
        "reverse two digits", train, held_out, recipe, lora_rank=16, lora_alpha=32.0, unembed=True, lessons=lessons
    )


def _split(problems: Sequence[Problem]) -> tuple[list[Problem], list[Problem]]:
    """Problem 10a + b is held out where a + 2b leaves 1 modulo 5: every digit equally often, and every sum in about its
    share of the training problems, so that what is measured is not one that training never saw."""
    held = [(n // 10 + 2 * (n % 10)) % 5 == 1 for n in range(len(problems))]
    return [p for p, out in zip(problems, held, strict=True) if not out], [
        p for p, out in zip(problems, held, strict=True) if out
    ]

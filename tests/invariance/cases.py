"""Cases: a model, rounds of a batch and a step, and ways to carry them out that must not show in any number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from engine.tiny import VOCAB
from hypothesis import strategies as st
from invariance.groups import Call, create, forward, forward_backward, step
from invariance.judge import Judge
from reference.cases import CONFIGS, LOSSES

from tinsmith.bus.protocol.datum import Datum

CONTEXT = 64
STEP = {"lr": 1e-2, "eps": 0.1, "weight_decay": 0.1, "grad_clip_norm": 1.0}
"""eps well above rounding: an update of sign(g) would blow rounding errors up wherever a gradient is about 0."""
SPECS: dict[str, dict[str, Any] | None] = {
    "full": None,
    "lora": {"rank": 4, "alpha": 12.0},
    "attention": {"rank": 2, "alpha": 1.0, "mlp": False},
    "head": {"rank": 3, "alpha": 6.0, "unembed": True, "attn": False},
}
NEIGHBOURS = ("adapter", "adapter steps", "full steps", "scores", "refused")


def scale_of(spec: dict[str, Any]) -> float:
    return float(spec["alpha"]) / float(spec["rank"])


def random_adapters(shapes: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Values for adapters of these shapes, both factors away from 0, so that both have a gradient."""
    rng = np.random.default_rng(seed)
    return {
        n: (rng.normal(size=a.shape) * (0.1 if "lora_B" in n else a.shape[1] ** -0.5)).astype(np.float32)
        for n, a in shapes.items()
    }


@dataclass(frozen=True)
class Bearing:
    """Which tokens of a datum bear loss."""

    kind: str

    def pick(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        if self.kind == "all":
            return np.ones(shape, bool)
        return np.zeros(shape, bool) if self.kind == "none" else rng.random(shape) < 0.6


def make_datum(
    judge: Judge, rng: np.random.Generator, loss: str, length: int, bearing: Bearing, k: int | None = None
) -> Datum:
    """A datum as a rollout on an earlier policy would give: sampler log-probs about the model's own.

    Ratios keep off the clip thresholds, where float32 and float64 may fall on different sides.
    """
    shape = (length,) if k is None else (length, k)
    tokens, targets = rng.integers(0, VOCAB, length), rng.integers(0, VOCAB, shape)
    on = bearing.pick(rng, shape)
    inputs: dict[str, Any] = {"target_tokens": targets}
    if loss == "cross_entropy":
        inputs["weights"] = np.where(on, rng.choice([1.0, 0.5, -0.7, 2.0], shape), 0.0)
        return Datum(tokens, inputs)
    inputs["advantages"] = np.where(on, rng.normal(size=shape) + 0.1, 0.0)
    limits = [np.log(limit) for name, limit in CONFIGS[loss].items() if "clip" in name and limit > 0]
    # dro is a difference of log-probs, so it is exact against them, not against a small gap.
    gap = rng.normal(scale=1.0 if loss == "dro" else 0.25, size=length)
    if loss == "gspo":
        averaged = rng.random(length) < 0.8
        averaged[rng.integers(length)] = True
        inputs["sequence_ratio_mask"] = averaged.astype(np.float32)
        gap = np.where(averaged, gap - gap[averaged].mean() + rng.choice([-0.2, 0.01, 0.2]), gap)
    for limit in limits:
        gap = np.where(np.abs(gap - limit) < 1e-3, limit + 2e-3, gap) if loss != "gspo" else gap
    inputs["logprobs"] = judge.score(tokens, targets) - gap
    return Datum(tokens, inputs)


@dataclass(frozen=True)
class Case:
    """What is computed; nothing here may be changed without changing numbers."""

    spec: str
    loss: str
    k: int | None
    rounds: tuple[tuple[tuple[int, Bearing], ...], ...]
    """[rounds][datums] of (tokens, which bear loss)."""
    seed: int
    weighted: bool = True
    """Whether cross_entropy gets weights; without them every token bears loss."""

    def batch(self, judge: Judge, number: int) -> list[Datum]:
        rng = np.random.default_rng([self.seed, number])
        data = [make_datum(judge, rng, self.loss, n, bearing, self.k) for n, bearing in self.rounds[number]]
        if self.weighted:
            return data
        return [Datum(d.tokens, {name: v for name, v in d.inputs.items() if name != "weights"}) for d in data]


@dataclass(frozen=True)
class Way:
    """How a round is carried out: none of it may show in any number but those about the plan.

    order: the datums' places are sorted by these numbers; cuts: places between datums where a new call begins;
    between: what others do after each call.
    """

    budget: int
    order: tuple[float, ...]
    cuts: frozenset[int]
    between: tuple[str, ...]

    def chunks(self, count: int) -> list[list[int]]:
        """Indices of datums, call by call."""
        order = sorted(range(count), key=lambda i: (self.order[i % len(self.order)], i))
        edges = [0, *sorted(cut for cut in self.cuts if 0 < cut < count), count]
        return [order[a:b] for a, b in pairwise(edges)]


bearings = st.sampled_from(["some", "some", "all", "none"]).map(Bearing)
lengths = st.one_of(st.integers(1, 8), st.integers(1, CONTEXT), st.just(CONTEXT), st.just(1))
rounds = st.lists(st.tuples(lengths, bearings), min_size=1, max_size=6).map(tuple)
seeds = st.integers(0, 2**16)
ways = st.builds(
    Way,
    budget=st.one_of(st.integers(1, 40), st.integers(40, 400)),
    order=st.lists(st.floats(0, 1), min_size=6, max_size=6).map(tuple),
    cuts=st.frozensets(st.integers(1, 5), max_size=3),
    between=st.lists(st.sampled_from(NEIGHBOURS), max_size=2).map(tuple),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    loss = draw(st.sampled_from(LOSSES))
    k = draw(st.sampled_from([None, None, 1, 3])) if loss == "cross_entropy" else None
    spec = draw(st.sampled_from(list(SPECS)))
    return Case(spec, loss, k, tuple(draw(st.lists(rounds, min_size=1, max_size=2))), draw(seeds), draw(st.booleans()))


def neighbour(what: str, own: Sequence[Datum], case: Case, number: int) -> list[Call]:
    """What others (and `m` itself, scoring) do in between; each leaves nothing behind but memory."""
    rng = np.random.default_rng(number)
    tokens = rng.integers(0, VOCAB, 9)
    data = [Datum(tokens, {"target_tokens": tokens}), Datum(tokens[:4], {"target_tokens": tokens[:4]})]
    if what == "scores":
        return [forward(own, case.loss, CONFIGS[case.loss], budget=50)]
    if what == "refused":
        wrong = [*own, Datum([VOCAB], {"target_tokens": [0]})]
        return [forward_backward(wrong, "cross_entropy")]
    name = f"x{number}"
    calls = [create(name, None if what == "full steps" else {"rank": 2, "unembed": True, "seed": number})]
    calls.append(forward_backward(data, "cross_entropy", model=name))
    if "steps" in what:
        calls += [step(name, lr=0.5), forward_backward(data, "cross_entropy", model=name), Call("unload", name)]
    return calls

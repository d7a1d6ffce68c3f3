"""Random datums that fit each built-in loss, small enough for the reference trainer."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinsmith.bus.protocol.datum import Datum

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
POLICY = LOSSES[1:]
CONFIGS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05},
}


def random_datum(rng: np.random.Generator, length: int, vocab: int, loss: str, k: int | None = None) -> Datum:
    """One datum of this loss: about a third of its tokens bear no loss, weights and advantages of both signs."""
    shape = (length,) if k is None else (length, k)
    inputs: dict[str, Any] = {"target_tokens": rng.integers(0, vocab, shape)}
    off = rng.random(shape) < 0.3
    if loss == "cross_entropy":
        inputs["weights"] = np.where(off, 0.0, rng.normal(size=shape))
    else:
        inputs["logprobs"] = -rng.exponential(size=length) - 1.0
        inputs["advantages"] = np.where(off, 0.0, rng.normal(size=length))
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = (rng.random(length) < 0.8).astype(np.float32)
            inputs["sequence_ratio_mask"][rng.integers(length)] = 1.0
    return Datum(rng.integers(0, vocab, length), inputs)


def random_batch(seed: int, lengths: tuple[int, ...], vocab: int, loss: str, k: int | None = None) -> list[Datum]:
    """Datums of these lengths; the same for the same seed."""
    rng = np.random.default_rng(seed)
    return [random_datum(rng, length, vocab, loss, k) for length in lengths]

"""Supervised fine-tuning: all steps are enqueued ahead, so that no time passes between them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import numpy as np

from tinsmith.api import Datum, Model


async def teach(
    model: Model, tokenizer: Any, batches: Iterable[Sequence[tuple[str, str]]], lr: float
) -> AsyncIterator[float]:
    """One optimizer step for each batch of (prompt, completion); gives each step's loss per token, nats."""
    sent = []
    for batch in batches:
        data = [to_datum(tokenizer, prompt, completion) for prompt, completion in batch]
        sent.append((model.forward_backward(data, "cross_entropy"), model.optim_step(lr=lr)))
    for forward_backward, optim_step in sent:
        loss = (await forward_backward).metrics["loss:mean"]
        await optim_step
        yield loss


def to_datum(tokenizer: Any, prompt: str, completion: str) -> Datum:
    """Position i predicts token i + 1; only the completion bears loss."""
    start = tokenizer.encode(prompt)
    tokens = start + tokenizer.encode(completion, add_special_tokens=False)
    weights = [0.0] * (len(start) - 1) + [1.0] * (len(tokens) - len(start))
    return Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": np.array(weights)})

"""What is trained on: a batch of which a step takes about 100 ms on one core a rank, and a small one for the doors."""

from __future__ import annotations

import numpy as np

from tinsmith.bus.protocol.datum import Datum
from tinsmith.ops.bench.random_llama import make_data

WORLD = 2
VOCAB = 2048
TOKEN_BUDGET = 4096
"""The service's default."""
DATUMS = 8
LR = 1e-4

SMALL_DATUMS, SMALL_TOKENS, SMALL_VOCAB = 4, 12, 19
AHEAD = 4
"""Steps that a pipelined client keeps enqueued before it awaits the oldest."""


def training_data() -> list[Datum]:
    """The same batch at every call."""
    lengths = np.random.default_rng(5).integers(24, 41, DATUMS)
    return make_data(lengths, VOCAB)

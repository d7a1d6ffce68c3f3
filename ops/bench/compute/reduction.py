"""What the metric catalogue costs a step."""

from __future__ import annotations

from statistics import median

import numpy as np

from tinsmith.actors.engine.losses.columns import COMMON_COLUMNS
from tinsmith.actors.metrics import Catalogue
from tinsmith.bus.protocol.envelope import Kind
from tinsmith.ops.bench.row import Row, at_most, seconds_of
from tinsmith.ops.bench.stage import Stage

DATUMS = 256
STEP_MS = 100.0
EXTRA = 12
"""Metrics of a user's own beside the built-in ones."""


async def metrics(stage: Stage) -> list[Row]:
    """Reducing every metric of a forward_backward over 256 datums, as a share of a step of 100 ms."""
    overlay = stage.folder / "extra.toml"
    entries = "\n".join(
        f'[extra_{n}]\nreduce = "sum"\nsource = "extra_{n}"\nunit = "1"\nhelp = "A column of the user\'s own."'
        for n in range(EXTRA)
    )
    overlay.write_text(entries)
    catalogue = Catalogue.load([overlay])
    rng = np.random.default_rng(0)
    names = sorted(COMMON_COLUMNS) + ["pg_loss"] + [f"extra_{n}" for n in range(EXTRA)]
    rows = {name: rng.uniform(1, 2, DATUMS) for name in names}
    scalars = {"tokens_computed": 4096.0, "padding_tokens": 100.0, "micro_batches": 4.0}
    published = len(catalogue.reduce(Kind.FORWARD_BACKWARD, rows, scalars).metrics)
    times = [seconds_of(lambda: catalogue.reduce(Kind.FORWARD_BACKWARD, rows, scalars)) for _ in range(300)]
    share = 100 * 1000 * median(times) / STEP_MS
    return [at_most("metrics", share, 2.0, "% of a step", f"{published} metrics, {1000 * median(times):.2f} ms")]

"""Who goes first on cores that are too few: what computes for long steps back behind what answers at once."""

from __future__ import annotations

import os

NICENESS = 5
"""Of processes that compute on the CPU; the door, the coordinator and the bus stay at 0."""


def yield_to_others() -> None:
    """Lower this process's priority, once."""
    os.nice(NICENESS - os.getpriority(os.PRIO_PROCESS, 0))

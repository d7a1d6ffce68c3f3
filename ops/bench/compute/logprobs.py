"""Peak memory of the log-prob path at a large vocabulary, which must not grow with the batch.

`python -m tinsmith.ops.bench.compute.logprobs MODEL TOKENS` runs one forward_backward and prints its
own peak in MB.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from tinsmith.bus.protocol.errors import TinsmithError
from tinsmith.ops.bench.random_llama import make_data
from tinsmith.ops.bench.row import Row, slower_by
from tinsmith.ops.bench.stage import Stage

VOCAB = 49152
SEQUENCE, BUDGET = 128, 1024
SMALL, LARGE = 1024, 16384
"""Tokens of the two batches."""


async def logprob_memory(stage: Stage) -> list[Row]:
    """The peak at 16k tokens beside that at 1k, both under the same token budget, each in a fresh process."""
    await stage.clear()
    path = stage.llama("wide-head", vocab=VOCAB, hidden=64, layers=1, context=SEQUENCE)
    small, large = (_peak(path, tokens) for tokens in (SMALL, LARGE))
    whole = LARGE * VOCAB * 4 / 1e6
    note = f"16k and 1k tokens, vocabulary {VOCAB}; all logits at once would be {whole:.0f} MB"
    return [slower_by("logprob_memory", large, small, 1.1, "MB", note)]


def _peak(path: Path, tokens: int) -> float:
    command = [sys.executable, "-m", "tinsmith.ops.bench.compute.logprobs", str(path), str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TinsmithError(f"the log-prob process failed: {done.stderr[-500:]}")
    return float(done.stdout.split()[-1])


def _run(path: str, tokens: int) -> float:
    from tinsmith.actors.engine.engine import Engine
    from tinsmith.bus.protocol.commands import CreateModelArgs, ForwardArgs, LoraSpec

    engine = Engine(path, alias="wide", token_budget=BUDGET)
    engine.create("m", CreateModelArgs(base="wide", lora=LoraSpec(rank=8)))
    data = make_data(np.full(tokens // SEQUENCE, SEQUENCE), VOCAB)
    engine.forward("m", data, engine.plan(data), ForwardArgs(loss="cross_entropy"), backward=True)
    # Not getrusage: its high-water mark begins with that of the process which started this one.
    status = Path("/proc/self/status").read_text()
    return float(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


if __name__ == "__main__":
    print(_run(sys.argv[1], int(sys.argv[2])))

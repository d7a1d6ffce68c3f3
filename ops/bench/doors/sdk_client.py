"""A program that uses the official Tinker SDK, measured from within.

Started as `python -m tinsmith.ops.bench.doors.sdk_client URL BASE KEY`. Each line on stdin is a job as JSON,
`{"job": NAME}` and its arguments; the answer is one line of JSON: what the job returns, and `cpu`, the seconds it
used.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from functools import cached_property
from typing import Any

import numpy as np
import tinker
from tinker import types

from tinsmith.ops.bench.doors.http_client import PROMPT
from tinsmith.ops.bench.workload import AHEAD, SMALL_DATUMS, SMALL_TOKENS, SMALL_VOCAB


class Jobs:
    """Each job is a method; clients are made when the first job needs them."""

    def __init__(self, url: str, base: str, key: str) -> None:
        self._service = tinker.ServiceClient(base_url=url, api_key=key)
        self._base = base
        rng = np.random.default_rng(0)
        self._data = [
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens.tolist()),
                loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(targets)},
            )
            for tokens, targets in rng.integers(1, SMALL_VOCAB, (SMALL_DATUMS, 2, SMALL_TOKENS))
        ]

    @cached_property
    def _model(self) -> Any:
        return self._service.create_lora_training_client(self._base, rank=4).result()

    @cached_property
    def _sampler(self) -> Any:
        return self._service.create_sampling_client(base_model=self._base).result()

    def ready(self) -> dict[str, Any]:
        """Both clients are made."""
        return {"model": self._model.model_id, "base": self._sampler.get_base_model()}

    def train(self, seconds: float) -> dict[str, Any]:
        """Pipelined steps for so long, and how many a second."""
        sent: deque[tuple[Any, Any]] = deque()
        done = 0
        begun = time.perf_counter()
        while True:
            more = time.perf_counter() - begun < seconds
            if more:
                sent.append((self._model.forward_backward(self._data, "cross_entropy"), self._step()))
            if not more and not sent:
                break
            if not more or len(sent) > AHEAD:
                for future in sent.popleft():
                    future.result()
                done += 1
        took = time.perf_counter() - begun
        return {"rate": done / took, "seconds": took}

    def steps(self, count: int) -> dict[str, Any]:
        """Milliseconds of each of so many optimizer steps, one after the other."""
        taken = []
        for _ in range(count):
            self._model.forward_backward(self._data, "cross_entropy").result()
            begun = time.perf_counter()
            self._step().result()
            taken.append(1000 * (time.perf_counter() - begun))
        return {"ms": taken}

    def sample(self, count: int, tokens: int) -> dict[str, Any]:
        """So many samples of so many tokens at once: seconds from the first request to the last result."""
        begun = time.perf_counter()
        futures = [self._sample(tokens) for _ in range(count)]
        lengths = [len(future.result().sequences[0].tokens) for future in futures]
        if lengths != [tokens] * count:
            raise ValueError(f"a sample of {tokens} tokens has {min(lengths)}")
        return {"seconds": time.perf_counter() - begun}

    def singles(self, count: int) -> dict[str, Any]:
        """Milliseconds of each of so many samples of one token, one after the other."""
        taken = []
        for _ in range(count):
            begun = time.perf_counter()
            self._sample(1).result()
            taken.append(1000 * (time.perf_counter() - begun))
        return {"ms": taken}

    def _step(self) -> Any:
        return self._model.optim_step(types.AdamParams(learning_rate=1e-4))

    def _sample(self, tokens: int) -> Any:
        # No stop at all: every sample has the length that was asked for.
        params = types.SamplingParams(max_tokens=tokens, stop=[])
        return self._sampler.sample(types.ModelInput.from_ints(PROMPT), num_samples=1, sampling_params=params)


def main(url: str, base: str, key: str) -> None:
    """Serve stdin until it closes."""
    jobs = Jobs(url, base, key)
    for line in sys.stdin:
        asked = json.loads(line)
        cpu = time.process_time()
        try:
            answer = getattr(jobs, asked.pop("job"))(**asked)
            answer["cpu"] = time.process_time() - cpu
        except Exception as error:  # Whatever it is, the benchmark tells it.
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

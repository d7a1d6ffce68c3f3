"""Sampling beside transformers.generate on the small real model: equal requests at once, mixed ones that arrive."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tinsmith.actors.engine.model.base import load_base
from tinsmith.actors.engine.model.gguf import unpacked
from tinsmith.actors.sampling.engines.builtin.generator import Generator
from tinsmith.actors.sampling.engines.builtin.sample import Finished, SampleRequest
from tinsmith.api.client.address import default_cache
from tinsmith.bus.protocol.commands import SampleArgs
from tinsmith.bus.protocol.errors import NotAModel, TinsmithError
from tinsmith.ops.bench.row import Row, faster_by
from tinsmith.ops.bench.stage import Stage
from tinsmith.ops.demo.models import find_smollm2

THREADS = 2
BATCH = 16
EQUAL_PROMPT, EQUAL_TOKENS = 16, 32
MIXED = 32
ROUNDS, LIMIT_SECONDS = 3, 60.0
"""Rounds of turns; on a slow machine fewer, once the limit has passed."""
EVERY_SECONDS = 0.1
"""Time from one arrival to the next."""
AGREEMENT = 0.9
"""Least share of greedy tokens that both must have in common: rounding alone may part a few sequences."""


@dataclass(frozen=True)
class Request:
    """Continue `prompt` by exactly `tokens`; it may begin `arrives` seconds after the round."""

    prompt: npt.NDArray[np.int64]
    tokens: int
    arrives: float = 0.0


async def sampling(stage: Stage) -> list[Row]:
    """Tokens a second of both, greedy, in turns; no rows where SmolLM2 is not installed."""
    await stage.clear()
    try:
        file = find_smollm2()
    except NotAModel as error:
        stage.say(f"sampling is left out: {error}")
        return []
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        model = load_base(unpacked(file, default_cache()), name="smollm2").module
        note = f"SmolLM2, batch {BATCH}, {THREADS} threads"
        return [
            _measure("sampling: equal", model, _equal(), 0.95, f"{note}, beside generate"),
            _measure("sampling: mixed", model, _mixed(), 1.5, f"{note}, beside generate in batches"),
        ]
    finally:
        torch.set_num_threads(threads)


def _equal() -> list[Request]:
    rng = np.random.default_rng(0)
    return [Request(rng.integers(100, 40_000, EQUAL_PROMPT), EQUAL_TOKENS) for _ in range(BATCH)]


def _mixed() -> list[Request]:
    rng = np.random.default_rng(1)
    prompts = rng.integers(8, 49, MIXED)
    tokens = np.exp(rng.normal(np.log(16), 0.8, MIXED)).astype(int).clip(4, 64)
    return [
        Request(rng.integers(100, 40_000, prompt), int(count), number * EVERY_SECONDS)
        for number, (prompt, count) in enumerate(zip(prompts, tokens, strict=True))
    ]


def _measure(name: str, model: Any, requests: Sequence[Request], limit: float, note: str) -> Row:
    total = sum(request.tokens for request in requests)
    speeds: dict[str, list[float]] = {"ours": [], "reference": []}
    begun = time.monotonic()
    for turn in range(ROUNDS):
        if turn and time.monotonic() - begun > LIMIT_SECONDS:
            break
        seconds, ours = _generator(model, requests)
        speeds["ours"].append(total / seconds)
        seconds, theirs = _transformers(model, requests)
        speeds["reference"].append(total / seconds)
        _compare(ours, theirs)
    return faster_by(name, speeds["ours"], speeds["reference"], limit, "tokens/s", note)


def _generator(model: Any, requests: Sequence[Request]) -> tuple[float, list[list[int]]]:
    """Seconds, and the tokens of each request, with requests joining between two tokens."""
    generator = Generator(model, max_rows=BATCH)
    answers: dict[str, Finished] = {}
    sent = 0
    begun = time.perf_counter()
    while len(answers) < len(requests):
        now = time.perf_counter() - begun
        while sent < len(requests) and requests[sent].arrives <= now:
            args = SampleArgs(max_tokens=requests[sent].tokens, temperature=0.0, stop_tokens=())
            generator.submit(SampleRequest(str(sent), requests[sent].prompt.astype(np.int32), args))
            sent += 1
        if not generator.busy:
            time.sleep(max(0.0, requests[sent].arrives - now))
        for answer in generator.step():
            if not isinstance(answer, Finished):
                raise answer.error
            answers[answer.id] = answer
    seconds = time.perf_counter() - begun
    generator.close()
    return seconds, [answers[str(number)].sequences[0].tokens.tolist() for number in range(len(requests))]


def _transformers(model: Any, requests: Sequence[Request]) -> tuple[float, list[list[int]]]:
    """The same with `generate`: whoever waits, up to a batch, left-padded, to the end of the longest."""
    done: list[list[int]] = []
    begun = time.perf_counter()
    while len(done) < len(requests):
        now = time.perf_counter() - begun
        waiting = [request for request in requests[len(done) :] if request.arrives <= now][:BATCH]
        if not waiting:
            time.sleep(max(0.0, requests[len(done)].arrives - now))
            continue
        done += _batch(model, waiting)
    return time.perf_counter() - begun, done


def _batch(model: Any, requests: Sequence[Request]) -> list[list[int]]:
    width = max(len(request.prompt) for request in requests)
    ids = torch.zeros((len(requests), width), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        ids[row, width - len(request.prompt) :] = torch.from_numpy(request.prompt)
        mask[row, width - len(request.prompt) :] = 1
    longest = max(request.tokens for request in requests)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=longest,
            eos_token_id=None,
            pad_token_id=0,
        )
    return [out[row, width : width + request.tokens].tolist() for row, request in enumerate(requests)]


def _compare(ours: list[list[int]], theirs: list[list[int]]) -> None:
    """Raise where the two did not sample the same: a speed means nothing then."""
    same = sum(a == b for mine, other in zip(ours, theirs, strict=True) for a, b in zip(mine, other, strict=True))
    total = sum(map(len, ours))
    if same < AGREEMENT * total:
        raise TinsmithError(f"only {same} of {total} greedy tokens are those of transformers.generate")

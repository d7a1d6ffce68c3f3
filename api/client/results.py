"""What an awaited call returns: typed results, decoded from a command's event and body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tinsmith.bus.protocol.codec import decode, unpack_ragged
from tinsmith.bus.protocol.envelope import Event
from tinsmith.bus.protocol.errors import ProtocolError


@dataclass(frozen=True)
class Result:
    """What every command gives: its event, and the metrics that the event carries."""

    event: Event

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metric key -> value, e.g. `total_loss:sum`."""
        return self.event.metrics


@dataclass(frozen=True)
class ForwardResult(Result):
    """Of forward and forward_backward. logprobs: for each datum float32 [tokens] or [tokens, K], nats."""

    logprobs: tuple[npt.NDArray[np.float32], ...]


@dataclass(frozen=True)
class Version(Result):
    """Of publish: `name` is what `sample(version=...)` takes."""

    name: str


@dataclass(frozen=True)
class Checkpoint(Result):
    """Of save: `name` is what `load` takes."""

    name: str


@dataclass(frozen=True)
class SampledSequence:
    """One continuation. tokens int32 [n] with the stop token; logprobs float32 [n], nats, at the temperature used."""

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    stop_reason: str
    text: str


@dataclass(frozen=True)
class SampleResult(Result):
    """Of sample. prompt_logprobs: float32 [prompt tokens], NaN first; None unless asked for."""

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: npt.NDArray[np.float32] | None


def read_forward(event: Event, body: bytes) -> ForwardResult:
    """From the event and body of forward or forward_backward."""
    arrays = unpack_ragged(_tree(body)["logprobs"])
    return ForwardResult(event, tuple(array for array in arrays if array is not None))


def read_sample(event: Event, body: bytes) -> SampleResult:
    """From the event and body of sample."""
    tree = _tree(body)
    columns = zip(
        unpack_ragged(tree["tokens"]),
        unpack_ragged(tree["logprobs"]),
        event.result["stop_reasons"],
        event.result["texts"],
        strict=True,
    )
    sequences = tuple(
        SampledSequence(tokens, logprobs, reason, text)
        for tokens, logprobs, reason, text in columns
        if tokens is not None and logprobs is not None
    )
    return SampleResult(event, sequences, tree.get("prompt_logprobs"))


def read_version(event: Event, body: bytes) -> Version:
    """From the event of publish."""
    return Version(event, str(event.result["version"]))


def read_checkpoint(event: Event, body: bytes) -> Checkpoint:
    """From the event of save."""
    return Checkpoint(event, str(event.result["checkpoint"]))


def read_plain(event: Event, body: bytes) -> Result:
    """From any event: metrics and `event.result`."""
    return Result(event)


def _tree(body: bytes) -> dict[str, Any]:
    tree = decode(body) if body else None
    if not isinstance(tree, dict):
        raise ProtocolError(
            "the result has no body", remedy="It was dropped after delivery; submit again with a new id."
        )
    return tree

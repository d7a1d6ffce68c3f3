"""What the sampler replica asks of an engine, so that another one (with paged attention on a GPU, say) can take the
place of the generator that is built in."""

from __future__ import annotations

from typing import Protocol

from tinsmith.actors.sampling.engines.builtin.sample import Failed, Finished, SampleRequest
from tinsmith.bus.protocol.parts import Part


class SamplingEngine(Protocol):
    """Generates for many requests at once. One thread calls it, and calls `step` while it is `busy`."""

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do or to answer."""

    def submit(self, request: SampleRequest) -> None:
        """Queue a request; raises InvalidInput, SequenceTooLong or UnknownVersion with nothing queued."""

    def step(self) -> list[Finished | Failed]:
        """Go on by about one token a sequence; returns the requests that ended, each once."""

    def parts(self, id: str) -> list[Part]:
        """What a request with `args.stream` has sampled since the last call; the last parts come with its answer."""

    def cancel(self, id: str) -> bool:
        """Forget a request and free its place; False when it is not under way. It gets no answer."""

"""The doors: an async Python client and the command line."""

from tinsmith.api.client import Client, Model, connect
from tinsmith.api.pending import Pending
from tinsmith.api.results import Checkpoint, ForwardResult, Result, SampledSequence, SampleResult, Version
from tinsmith.bus.datum import Datum
from tinsmith.bus.envelope import Event, Kind
from tinsmith.bus.errors import Gap, TinsmithError
from tinsmith.bus.parts import Part

__all__ = [
    "Checkpoint",
    "Client",
    "Datum",
    "Event",
    "ForwardResult",
    "Gap",
    "Kind",
    "Model",
    "Part",
    "Pending",
    "Result",
    "SampleResult",
    "SampledSequence",
    "TinsmithError",
    "Version",
    "connect",
]

"""The doors: an async Python client and the command line."""

from tinsmith.api.client.client import Client, Model, connect
from tinsmith.api.client.pending import Pending
from tinsmith.api.client.results import Checkpoint, ForwardResult, Result, SampledSequence, SampleResult, Version
from tinsmith.bus.protocol.datum import Datum
from tinsmith.bus.protocol.envelope import Event, Kind
from tinsmith.bus.protocol.errors import Gap, TinsmithError
from tinsmith.bus.protocol.parts import Part

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

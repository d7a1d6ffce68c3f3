"""A service with its HTTP door, as a user starts one, and what its door's processes use."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tinsmith.ops.bench.processes import cpu_seconds, door_processes
from tinsmith.ops.local import local_service


@dataclass(frozen=True)
class HttpService:
    """`address` answers HTTP, `state` is its folder, `alias` names its base model."""

    address: str
    state: str
    alias: str

    def door_seconds(self) -> float:
        """CPU that the door's replicas and their proxy have used so far."""
        return sum(map(cpu_seconds, door_processes(self.state)))


@asynccontextmanager
async def http_service(model: Path, alias: str) -> AsyncIterator[HttpService]:
    """`tinsmith serve` with its door on a free port; stopped at the end. Raises StartupError."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with local_service(model, alias, lambda text: None, port=port) as state:
        yield HttpService(f"http://127.0.0.1:{port}", state, alias)

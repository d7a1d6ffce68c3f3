"""A service with its HTTP door, as a user starts one, and what its door's processes use."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tinsmith.bus.errors import StartupError
from tinsmith.ops.bench.processes import cpu_seconds, door_processes

STOP_SECONDS = 60.0


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
async def http_service(model: Path, alias: str, state: Path, *options: str) -> AsyncIterator[HttpService]:
    """`tinsmith serve` with its door on a free port; stopped at the end. Raises StartupError."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tinsmith.api.cli", "serve", "--model", str(model), "--alias", alias]
    command += ["--state", str(state), "--port", str(port), *options]
    log = state.with_suffix(".log")
    with log.open("wb") as said:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=said,
            # The bus is its own, also where the user has one.
            env={name: value for name, value in os.environ.items() if name != "REDIS_URL"},
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        if not (await process.stdout.readline()).startswith(b"ready"):
            await process.wait()
            raise StartupError(f"the service ended before it was ready: {log.read_text()[-500:]}")
        yield HttpService(f"http://127.0.0.1:{port}", str(state), alias)
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            except TimeoutError:
                process.kill()
                await process.wait()

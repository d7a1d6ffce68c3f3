"""Programs that use the official Tinker SDK, each a process of its own, as tenants are."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from tinsmith.bus.protocol.errors import TinsmithError
from tinsmith.ops.bench.doors.http_service import HttpService
from tinsmith.ops.bench.stage import Stage


def has_sdk(stage: Stage, benchmark: str) -> bool:
    """Whether the SDK is installed; where it is not, the user hears how to get it."""
    if importlib.util.find_spec("tinker") is not None:
        return True
    stage.say(f"{benchmark} is left out: the Tinker SDK is not installed; run `pip install 'tinsmith[test]'`")
    return False


class SdkClient:
    """One such program, which waits between two jobs."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    async def run(self, job: str, **arguments: Any) -> dict[str, Any]:
        """What the job of that name in `sdk_client.Jobs` returns. Raises TinsmithError when it fails."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"job": job, **arguments}).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise TinsmithError(f"the SDK's program ended in {job}: {self._log.read_text()[-500:]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise TinsmithError(f"{job} through the SDK failed: {answer['error']}")
        return answer


@asynccontextmanager
async def sdk_clients(stage: Stage, service: HttpService, count: int) -> AsyncIterator[list[SdkClient]]:
    """So many tenants, each with a model and a sampler of its own."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(_client(stage, service, n)) for n in range(count)]
        await asyncio.gather(*(client.run("ready") for client in clients))
        yield clients


@asynccontextmanager
async def _client(stage: Stage, service: HttpService, number: int) -> AsyncIterator[SdkClient]:
    log = stage.folder / f"sdk-{number}.log"
    with log.open("wb") as said:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tinsmith.ops.bench.doors.sdk_client"),
            *(service.address, service.alias, f"tml-tenant-{number}"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=said,
            env={**os.environ, "TINKER_TELEMETRY": "0"},
        )
    try:
        yield SdkClient(process, log)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()

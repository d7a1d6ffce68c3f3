"""A service of one's own for the length of a program: started as a subprocess, stopped whatever happens."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tinsmith.bus.protocol.errors import BusUnreachable, StartupError

STOP_SECONDS = 60.0
"""How long a service may take to end after SIGTERM."""


@asynccontextmanager
async def local_service(
    model: Path, alias: str, say: Callable[[str], None], *, ranks: int = 2, samplers: int = 1, port: int | None = None
) -> AsyncIterator[str]:
    """Serve `model` on a bus of its own in a temporary folder; gives the address for `connect`.

    port: of its HTTP door on this machine; None opens none.
    `say` hears what the service reports while it starts. Raises StartupError when it ends before it is ready, and
    BusUnreachable, in place of what runs inside, when it ends later.
    """
    with tempfile.TemporaryDirectory(prefix="tinsmith-demo-", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-m", "tinsmith.api.cli", "serve"]
        command += ["--no-http"] if port is None else ["--port", str(port)]
        command += ["--model", str(model), "--alias", alias]
        command += ["--ranks", str(ranks), "--samplers", str(samplers), "--state", folder]
        # The bus is its own, also where the user has one; a Ray cluster of theirs is used.
        environment = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
        environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            # Ctrl-C in the terminal reaches this program alone, which then stops the service in order.
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        said: deque[str] = deque(maxlen=20)
        # Read to the end, so that the service never blocks on a full pipe.
        reports = asyncio.create_task(_read(process.stderr, said, say))
        rest: asyncio.Task[None] | None = None
        try:
            ready = (await process.stdout.readline()).decode(errors="replace").strip()
            if not ready.startswith("ready"):
                await process.wait()
                await reports
                raise StartupError(
                    f"the service ended with code {process.returncode} before it was ready: {' | '.join(said)}",
                    remedy="Run `tinsmith serve` by itself to see why.",
                )
            rest = asyncio.create_task(_read(process.stdout, said, say))
            say(ready)
            body = asyncio.current_task()
            assert body is not None
            watch = asyncio.create_task(_cancel_at_end(process, body))
            try:
                yield folder
            except asyncio.CancelledError:
                if process.returncode is None:
                    raise
                body.uncancel()
                raise BusUnreachable(
                    f"the service ended by itself with code {process.returncode}: {' | '.join(said)}",
                    remedy="Run `tinsmith serve` by itself to see why.",
                ) from None
            finally:
                watch.cancel()
        finally:
            await _stop(process)
            for task in (reports, rest):
                if task is not None:
                    task.cancel()


async def _cancel_at_end(process: asyncio.subprocess.Process, body: asyncio.Task[object]) -> None:
    """Wake the program that uses the service when that ends: it may wait for a result that never comes."""
    await process.wait()
    body.cancel()


async def _read(stream: asyncio.StreamReader, said: deque[str], say: Callable[[str], None]) -> None:
    async for line in stream:
        text = line.decode(errors="replace").rstrip()
        if text:
            said.append(text)
            say(text)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()

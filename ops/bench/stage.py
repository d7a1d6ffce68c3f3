"""Stage: what benchmarks stand on, made when first asked for and taken down at the end of the run."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from tinsmith.ops.bench.doors.http_service import HttpService, http_service
from tinsmith.ops.bench.random_llama import make_llama
from tinsmith.ops.demo.models import make_tiny
from tinsmith.ops.local import local_service

TINY_VOCAB = 160
HTTP_CONTEXT = 2048


@dataclass(frozen=True)
class Running:
    """A service of the bench: `url` is its state folder, `seconds` its way from the command to `ready`."""

    url: str
    seconds: float


class Stage:
    """A temporary folder, and services of the tiny model that several benchmarks share."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._stack = AsyncExitStack()
        self._tiny: Running | None = None
        self._http: HttpService | None = None
        self.folder = Path()

    async def __aenter__(self) -> Stage:
        made = tempfile.TemporaryDirectory(prefix="tinsmith-bench-", ignore_cleanup_errors=True)
        self.folder = Path(self._stack.enter_context(made))
        self._services = await self._stack.enter_async_context(AsyncExitStack())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def llama(self, name: str, *, vocab: int, hidden: int, layers: int, context: int) -> Path:
        """The random model of that name, made once."""
        path = self.folder / name
        if not path.is_dir():
            make_llama(path, vocab=vocab, hidden=hidden, layers=layers, context=context)
        return path

    def tiny_model(self) -> Path:
        """The folder of the smallest model, of which a step takes next to nothing."""
        return self.llama("tiny", vocab=TINY_VOCAB, hidden=32, layers=2, context=256)

    async def tiny(self) -> Running:
        """The shared service of two ranks and a sampler; alias `tiny`."""
        if self._tiny is None:
            self._tiny = await self.serve(self.tiny_model(), "tiny")
        return self._tiny

    async def http(self) -> HttpService:
        """The shared service with an HTTP door: a model of two layers of width 64, with a tokenizer."""
        if self._http is None:
            await self.clear()
            model = make_tiny(self.folder / "tiny-64", context=HTTP_CONTEXT)
            self._http = await self._services.enter_async_context(http_service(model, "tiny"))
        return self._http

    async def serve(self, model: Path, alias: str, *, samplers: int = 1) -> Running:
        """A service as a user starts one; it runs until `clear`."""
        begun = time.monotonic()
        starting = local_service(model, alias, lambda text: None, ranks=2, samplers=samplers)
        url = await self._services.enter_async_context(starting)
        return Running(url, time.monotonic() - begun)

    async def clear(self) -> None:
        """Take every service down, so that what is measured next has the machine to itself."""
        self._tiny = self._http = None
        await self._services.aclose()
        # Ray's processes end a moment after the command that started them.
        await asyncio.sleep(1.0)

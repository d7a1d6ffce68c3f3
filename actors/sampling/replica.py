"""One inference replica: an async Ray actor whose single engine thread generates for all requests at once.

The actor's event loop takes and returns requests; the thread alone touches torch. A request joins the running batch at
the next token.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tinsmith.actors.service.options import ServiceOptions
from tinsmith.bus.protocol.codec import decode, encode, pack_ragged
from tinsmith.bus.protocol.commands import SampleArgs, parse_args
from tinsmith.bus.protocol.envelope import Kind
from tinsmith.bus.protocol.errors import CommandFailed, InvalidInput, TinsmithError, cancelled
from tinsmith.bus.protocol.parts import Part

if TYPE_CHECKING:
    from tinsmith.actors.sampling.engines.builtin.sample import Finished
    from tinsmith.actors.sampling.engines.protocol import SamplingEngine

log = logging.getLogger("tinsmith.sampler")

Sampled = tuple[dict[str, Any], bytes]
"""(the event's result, the body: tokens and log-probs as the envelope's page describes them)."""


@dataclass(eq=False)
class _Call:
    """One request and who waits for it."""

    command: str
    args: SampleArgs
    content: dict[str, Any]
    future: Future[Sampled]
    tell: Callable[[Sequence[Part]], object] | None
    """Where its parts go; None when it is not streamed."""
    generator: SamplingEngine | None = None


class SamplerReplica:
    """Holds the base model whole, and published versions as adapters over it."""

    def __init__(self, options: ServiceOptions) -> None:
        self._options = options
        self._wake = threading.Condition()
        self._arrived: list[_Call] = []
        self._unwanted: list[str] = []
        self._waiting: dict[str, _Call] = {}
        self._generators: dict[str, SamplingEngine] = {}
        self._thread: threading.Thread | None = None

    async def load(self) -> dict[str, Any]:
        """Load the base and start the engine thread. Raises NotAModel."""
        await asyncio.to_thread(self._load)
        self._thread = threading.Thread(target=self._run, name="sampler-engine", daemon=True)
        self._thread.start()
        return {"pid": os.getpid()}

    async def sample(self, command: str, args: dict[str, Any], body: bytes) -> Sampled | dict[str, Any]:
        """Sample as `args` (SampleArgs) says after the prompt in `body`; a refusal is TinsmithError.to_wire."""
        try:
            return await asyncio.wrap_future(self._enter(command, args, body, None))
        except TinsmithError as error:
            return error.at(command=command).to_wire()

    async def stream(
        self, command: str, args: dict[str, Any], body: bytes
    ) -> AsyncIterator[list[Part] | Sampled | dict[str, Any]]:
        """As `sample`, which comes last; before it parts, gathered while the last ones were on their way."""
        loop, fresh = asyncio.get_running_loop(), asyncio.Queue[Sequence[Part] | None]()
        try:
            future = asyncio.wrap_future(
                self._enter(command, args, body, lambda parts: loop.call_soon_threadsafe(fresh.put_nowait, parts))
            )
            future.add_done_callback(lambda _: fresh.put_nowait(None))
            ended = False
            while not ended:
                told = [await fresh.get()]
                while not fresh.empty():
                    told.append(fresh.get_nowait())
                ended = told[-1] is None
                yield [part for parts in told if parts is not None for part in parts]
            yield await future
        except TinsmithError as error:
            yield error.at(command=command).to_wire()

    async def live(self) -> None:
        """Never returns: whoever waits for it learns of this process's end."""
        await asyncio.Event().wait()

    async def cancel(self, command: str) -> None:
        """Stop a request, if it is here, and free its rows; its waiter gets Cancelled."""
        with self._wake:
            self._unwanted.append(command)
            self._wake.notify()

    def _enter(
        self, command: str, args: dict[str, Any], body: bytes, tell: Callable[[Sequence[Part]], object] | None
    ) -> Future[Sampled]:
        checked = parse_args(Kind.SAMPLE, args)
        content = decode(body) if body else {}
        if not isinstance(content, dict) or "prompt" not in content:
            raise InvalidInput("the body has no prompt", remedy="Send {'prompt': int32 array}.", field="prompt")
        future: Future[Sampled] = Future()
        # Whoever waits may be cancelled; the engine thread must be able to answer all the same.
        future.set_running_or_notify_cancel()
        with self._wake:
            self._arrived.append(_Call(command, checked, content, future, tell))
            self._wake.notify()
        return future

    def _load(self) -> None:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        import torch

        torch.set_num_threads(self._options.sampler_threads)
        self._generators["base"] = self._generator(Path(self._options.model_path))

    def _generator(self, path: Path) -> SamplingEngine:
        import torch

        from tinsmith.actors.engine.model.base import has_tokenizer, load_base, load_tokenizer
        from tinsmith.actors.sampling.engines.builtin.generator import Generator

        device = "cuda" if torch.cuda.is_available() else "cpu"
        tokenizer = Path(self._options.model_path)
        return Generator(
            load_base(path, name=self._options.alias).module.to(device),
            load_tokenizer(tokenizer) if has_tokenizer(tokenizer) else None,
            locate=self._locate,
            max_rows=self._options.sampler_rows,
        )

    def _run(self) -> None:
        try:
            self._serve_for_ever()
        except BaseException:
            # A process without this thread would answer nothing and look alive: a fresh one takes its place.
            log.critical("the engine thread ended", exc_info=True)
            os._exit(1)

    def _serve_for_ever(self) -> None:
        """The engine thread: admit what arrived, advance every generator by one token, answer what is finished."""
        while True:
            with self._wake:
                while not (self._arrived or self._unwanted or any(g.busy for g in self._generators.values())):
                    self._wake.wait()
                arrived, self._arrived = self._arrived, []
                unwanted, self._unwanted = self._unwanted, []
            for call in arrived:
                self._admit(call)
            for command in unwanted:
                self._drop(command)
            for generator in list(self._generators.values()):
                if generator.busy:
                    self._advance(generator)

    def _admit(self, call: _Call) -> None:
        from tinsmith.actors.sampling.engines.builtin.sample import SampleRequest

        content = call.content
        try:
            call.generator, version = self._serving(call.args.version)
            call.generator.submit(
                SampleRequest(call.command, content["prompt"], call.args, version, content.get("targets"))
            )
            self._waiting[call.command] = call
        except TinsmithError as error:
            call.future.set_exception(error)
        except Exception as error:
            call.future.set_exception(_failure(error))

    def _drop(self, command: str) -> None:
        call = self._waiting.pop(command, None)
        if call is not None and call.generator is not None:
            call.generator.cancel(command)
            call.future.set_exception(cancelled())

    def _serving(self, version: str) -> tuple[SamplingEngine, str]:
        """Who generates for a version: the base with its adapters, or the version's own whole model."""
        from tinsmith.actors.sampling.engines.builtin.versions import is_adapter, key_of

        if version == "base":
            return self._generators["base"], version
        path = self._options.version_dir(version)
        key = key_of(version, path)
        if is_adapter(path):
            return self._generators["base"], key
        if key not in self._generators:
            for idle in [key for key, g in self._generators.items() if key != "base" and not g.busy]:
                del self._generators[idle]
            self._generators[key] = self._generator(path)
        return self._generators[key], "base"

    def _locate(self, key: str) -> Path:
        """The directory of a version's key, while it is the one that lies there."""
        from tinsmith.actors.sampling.engines.builtin.versions import key_of, name_of, unpublished

        path = self._options.version_dir(name_of(key))
        if key_of(name_of(key), path) != key:
            raise unpublished(key)
        return path

    def _advance(self, generator: SamplingEngine) -> None:
        from tinsmith.actors.sampling.engines.builtin.sample import Finished

        try:
            finished = generator.step()
        except Exception as error:
            # The batch as a whole is broken: every request in it fails, the replica goes on with an empty one.
            failure = _failure(error)
            for call in [call for call in self._waiting.values() if call.generator is generator]:
                generator.cancel(call.command)
                del self._waiting[call.command]
                call.future.set_exception(failure)
            return
        for done in finished:
            ended = self._waiting.pop(done.id)
            if isinstance(done, Finished):
                if ended.tell is not None:
                    ended.tell(done.parts)
                ended.future.set_result(self._answer(ended.args, done))
            else:
                ended.future.set_exception(done.error)
        for call in self._waiting.values():
            if call.tell is not None and call.generator is generator and (parts := generator.parts(call.command)):
                call.tell(parts)

    def _answer(self, args: SampleArgs, done: Finished) -> Sampled:
        from tinsmith.actors.sampling.engines.builtin.alternatives import EMPTY, last_only

        body: dict[str, Any] = {
            "tokens": pack_ragged([sequence.tokens for sequence in done.sequences]),
            "logprobs": pack_ragged([sequence.logprobs for sequence in done.sequences]),
        }
        if args.topk:
            for name, part in (("topk_tokens", 0), ("topk_logprobs", 1)):
                body[name] = pack_ragged(
                    [sequence.topk[part] if sequence.topk else None for sequence in done.sequences]
                )
        if done.prompt_logprobs is not None:
            body["prompt_logprobs"] = last_only(done.prompt_logprobs, args.prompt_last_n, np.nan)
        if done.extras is not None and done.extras.topk is not None:
            body["prompt_topk_tokens"] = done.extras.topk[0]
            body["prompt_topk_logprobs"] = last_only(done.extras.topk[1], args.prompt_last_n, EMPTY)
        if done.extras is not None and done.extras.target_logprobs is not None:
            body["target_logprobs"] = done.extras.target_logprobs
        if done.extras is not None and done.extras.draws is not None:
            body["prompt_draws_tokens"], body["prompt_draws_logprobs"] = done.extras.draws
        result = {
            "version": args.version,
            "stop_reasons": [sequence.stop_reason for sequence in done.sequences],
            "texts": [sequence.text for sequence in done.sequences],
            "sampled_tokens": sum(len(sequence.tokens) for sequence in done.sequences),
        }
        return result, encode(body)


def _failure(error: Exception) -> CommandFailed:
    return CommandFailed(f"{type(error).__name__}: {error}", remedy="See the sampler's log.")

"""The Python door: an async client whose calls are enqueued at once and in order.

    async with connect() as client:
        model = await client.create_model("smollm2", lora_rank=8)
        step = model.forward_backward(data, "ppo"), model.optim_step(lr=1e-4)
        print((await step[0]).metrics["total_loss:sum"], (await step[1]).metrics["grad_norm"])

A call returns a Pending as soon as it is queued in this process; one sender a model puts the commands on the bus one
after the other, so their order is the order of the calls. A command is sent again with the same id after a lost reply,
and the bus takes it once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tinsmith.api.address import resolve_url
from tinsmith.api.pending import Pending, Reply
from tinsmith.api.results import (
    Checkpoint,
    ForwardResult,
    Result,
    SampleResult,
    Version,
    read_checkpoint,
    read_forward,
    read_plain,
    read_sample,
    read_version,
)
from tinsmith.bus.codec import encode
from tinsmith.bus.commands import parse_args
from tinsmith.bus.connection import open_bus
from tinsmith.bus.datum import Datum, pack_datums
from tinsmith.bus.envelope import SAMPLE_LANE, Command, Event, Kind, new_id
from tinsmith.bus.errors import BusUnreachable, Busy, Gap, TinsmithError
from tinsmith.bus.events import Streamed
from tinsmith.bus.inbox import Inbox
from tinsmith.bus.status import get_status
from tinsmith.bus.streams import Bus

T = TypeVar("T")
Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]

RETRY_SECONDS = (0.02, 1.0)
"""First and longest pause before a refused or lost submit is sent again."""


class Client:
    """A connection to one service's bus. Made by `connect`."""

    def __init__(self, bus: Bus, inbox: Inbox, submit_timeout: float) -> None:
        self._bus = bus
        self._inbox = inbox
        self._submit_timeout = submit_timeout
        self._senders: dict[str, _Sender] = {}

    def create_model(
        self,
        base: str,
        *,
        name: str | None = None,
        lora_rank: int | None = None,
        lora_alpha: float | None = None,
        seed: int = 0,
        attn: bool = True,
        mlp: bool = True,
        unembed: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> Pending[Model]:
        """A new model over `base`: LoRA adapters of `lora_rank`, or full fine-tuning when that is None."""
        lora = None
        if lora_rank is not None:
            lora = {"rank": lora_rank, "alpha": lora_alpha, "seed": seed, "attn": attn, "mlp": mlp, "unembed": unembed}
        model = name if name is not None else f"m-{new_id()[:12]}"
        args = {"base": base, "lora": lora, "metadata": dict(metadata or {})}
        return self._send(model, Kind.CREATE_MODEL, args, lambda event, body: Model(self, model, event.result))

    def model(self, name: str) -> Model:
        """A model that exists, made here or by another program."""
        return Model(self, name, {})

    def sample(
        self,
        prompt: Tokens,
        *,
        version: Version | str = "base",
        n: int = 1,
        max_tokens: int = 128,
        temperature: float = 1.0,
        top_k: int = -1,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] | Sequence[int] | None = None,
        prompt_logprobs: bool = False,
    ) -> Pending[SampleResult]:
        """`n` continuations of `prompt` (token ids) from one immutable version. `stop`: strings or token ids; None is
        the model's own end tokens, an empty list never stops early."""
        args: dict[str, Any] = {
            "version": version.name if isinstance(version, Version) else version,
            "n": n,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "seed": seed,
            "prompt_logprobs": prompt_logprobs,
        }
        if stop is not None:
            strings = [item for item in stop if isinstance(item, str)]
            args["stop_strings"] = strings
            if len(strings) < len(stop) or not stop:
                args["stop_tokens"] = [item for item in stop if not isinstance(item, str)]
        body = encode({"prompt": np.asarray(prompt, dtype=np.int32)})
        return self._send(SAMPLE_LANE, Kind.SAMPLE, args, read_sample, body)

    def events(
        self, models: Sequence[str] | None = None, *, since: str | Mapping[str, str] = "$"
    ) -> AsyncIterator[Streamed | Gap]:
        """Events of these models (None: of all, also those yet to come), each with the `id` to go on from.

        since: "$" from now on, "0" from the beginning, or model -> id after which to go on.
        Where retention has dropped events that were not read, a Gap with the exact count stands in their place.
        """
        return self._bus.events(models, since)

    async def result(self, command: str) -> Reply | None:
        """Event and body of any command by its id; None when it is unknown or not done."""
        return await self._bus.result(command)

    async def status(self) -> dict[str, Any] | None:
        """What the service last said of itself; None when no service runs on this bus."""
        return await get_status(self._bus)

    async def close(self) -> None:
        """Stop sending and reading. Commands on the bus go on."""
        for sender in self._senders.values():
            await sender.close()
        await self._inbox.close()
        await self._bus.close()

    def _send(
        self,
        model: str,
        kind: Kind,
        args: Mapping[str, Any],
        read: Callable[[Event, bytes], T],
        body: bytes = b"",
        lengths: tuple[int, ...] = (),
    ) -> Pending[T]:
        command = Command(
            id=new_id(),
            model=model,
            kind=kind,
            seq=-1 if kind is not Kind.CREATE_MODEL else 0,
            args=dict(args),
            lengths=lengths,
        )
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        if model not in self._senders:
            self._senders[model] = _Sender(self._bus, self._inbox, self._submit_timeout)
        try:
            parse_args(kind, command.args)
        except TinsmithError as error:
            reply.set_exception(error.at(model=model, command=command.id))
        else:
            self._senders[model].enqueue(command, body, reply)
        return Pending(command, reply, read)


class Model:
    """A handle on one model; calls are carried out in the order in which they are made."""

    def __init__(self, client: Client, name: str, facts: Mapping[str, Any]) -> None:
        self._client = client
        self.name = name
        self.facts = facts
        """As `info` described it when this program created it; empty otherwise."""

    def forward(
        self, data: Sequence[Datum], loss: str = "cross_entropy", config: Mapping[str, Any] | None = None
    ) -> Pending[ForwardResult]:
        """Log-probs and metrics without a gradient."""
        return self._batch(Kind.FORWARD, data, loss, config)

    def forward_backward(
        self, data: Sequence[Datum], loss: str, config: Mapping[str, Any] | None = None
    ) -> Pending[ForwardResult]:
        """Log-probs and metrics; the gradient is added to what was gathered since the last optim_step."""
        return self._batch(Kind.FORWARD_BACKWARD, data, loss, config)

    def optim_step(self, lr: float, **adam: Any) -> Pending[Result]:
        """One AdamW step. adam: beta1, beta2, eps, weight_decay, grad_clip_norm, on_non_finite, abort_after."""
        return self._client._send(self.name, Kind.OPTIM_STEP, {"lr": lr, **adam}, read_plain)

    def save(self, name: str, *, overwrite: bool = False) -> Pending[Checkpoint]:
        """A checkpoint of weights, optimizer state and position."""
        return self._client._send(self.name, Kind.SAVE, {"name": name, "overwrite": overwrite}, read_checkpoint)

    def load(self, checkpoint: Checkpoint | str, *, optimizer: bool = False) -> Pending[Result]:
        """Take a checkpoint's weights, and its optimizer state only when asked."""
        place = checkpoint.name if isinstance(checkpoint, Checkpoint) else checkpoint
        return self._client._send(self.name, Kind.LOAD, {"checkpoint": place, "optimizer": optimizer}, read_plain)

    def publish(self, name: str) -> Pending[Version]:
        """An immutable version of the weights as they are at this point of the order, for sampling."""
        return self._client._send(self.name, Kind.PUBLISH, {"name": name}, read_version)

    def unload(self) -> Pending[Result]:
        """Forget the model; its checkpoints and versions stay."""
        return self._client._send(self.name, Kind.UNLOAD, {}, read_plain)

    def info(self) -> Pending[Result]:
        """What the model is and where it stands, in `event.result`."""
        return self._client._send(self.name, Kind.INFO, {}, read_plain)

    def _batch(
        self, kind: Kind, data: Sequence[Datum], loss: str, config: Mapping[str, Any] | None
    ) -> Pending[ForwardResult]:
        body, lengths = pack_datums(data)
        args = {"loss": loss, "config": dict(config or {})}
        return self._client._send(self.name, kind, args, read_forward, body, lengths)


class _Sender:
    """Puts one model's commands on the bus, one after the other."""

    def __init__(self, bus: Bus, inbox: Inbox, timeout: float) -> None:
        self._bus = bus
        self._inbox = inbox
        self._timeout = timeout
        self._queue: asyncio.Queue[tuple[Command, bytes, asyncio.Future[Reply]]] = asyncio.Queue()
        self._waiters: set[asyncio.Task[Reply]] = set()
        self._task = asyncio.create_task(self._run())

    def enqueue(self, command: Command, body: bytes, reply: asyncio.Future[Reply]) -> None:
        """Send after all that was enqueued before."""
        self._queue.put_nowait((command, body, reply))

    async def close(self) -> None:
        """Let what is enqueued leave, then stop."""
        await self._queue.join()
        self._task.cancel()
        for waiter in self._waiters:
            waiter.cancel()
        await asyncio.gather(self._task, *self._waiters, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            command, body, reply = await self._queue.get()
            try:
                await self._submit(command, body)
                waiter = asyncio.create_task(self._inbox.wait(command.id))
                waiter.add_done_callback(partial(_pass_on, reply))
                self._waiters.add(waiter)
                waiter.add_done_callback(self._waiters.discard)
            except TinsmithError as error:
                if not reply.done():
                    reply.set_exception(error.at(model=command.model, command=command.id))
            finally:
                self._queue.task_done()

    async def _submit(self, command: Command, body: bytes) -> None:
        """Submit until the bus has it. Raises the last Busy or BusUnreachable after the timeout, or what forbids it."""
        pause, longest = RETRY_SECONDS
        deadline = asyncio.get_running_loop().time() + self._timeout
        while True:
            try:
                await self._inbox.submit(command, body)
                return
            except (Busy, BusUnreachable):
                if asyncio.get_running_loop().time() + pause > deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)


def _pass_on(reply: asyncio.Future[Reply], delivered: asyncio.Task[Reply]) -> None:
    if reply.done():
        return
    if delivered.cancelled():
        reply.cancel()
    elif (error := delivered.exception()) is not None:
        reply.set_exception(error)
    else:
        reply.set_result(delivered.result())


@asynccontextmanager
async def connect(
    url: str | os.PathLike[str] | None = None, *, bus: str = "tinsmith", submit_timeout: float = 30.0
) -> AsyncIterator[Client]:
    """A client of the service whose bus is at `url`: a redis:// or unix:// URL, or the state directory of a service on
    this machine. Without one, $REDIS_URL, then the default state directory.

    Raises BusUnreachable when no bus answers.
    """
    opened = await open_bus(resolve_url(url), bus)
    client = Client(opened, await opened.inbox().start(), submit_timeout)
    try:
        yield client
    finally:
        await client.close()

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
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tinsmith.api.client.address import resolve_url
from tinsmith.api.client.pending import Completion, Pending
from tinsmith.api.client.results import (
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
from tinsmith.api.client.sender import Sender
from tinsmith.bus.bus import Bus
from tinsmith.bus.connection import open_bus
from tinsmith.bus.events import Streamed
from tinsmith.bus.inbox import Inbox
from tinsmith.bus.protocol.codec import encode
from tinsmith.bus.protocol.commands import parse_args
from tinsmith.bus.protocol.datum import Datum, pack_datums
from tinsmith.bus.protocol.envelope import CONTROL_LANE, LANES, SAMPLE_LANE, Command, Event, Kind, new_id
from tinsmith.bus.protocol.errors import Gap, TinsmithError
from tinsmith.bus.protocol.parts import Part, Told, wholes
from tinsmith.bus.status import get_status

T = TypeVar("T")
Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]


class Client:
    """A connection to one service's bus. Made by `connect`."""

    def __init__(self, bus: Bus, inbox: Inbox, submit_timeout: float) -> None:
        self._bus = bus
        self._inbox = inbox
        self._submit_timeout = submit_timeout
        self._senders: dict[str, Sender] = {}

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
            **_stop_args(stop),
        }
        body = encode({"prompt": np.asarray(prompt, dtype=np.int32)})
        return self._send(SAMPLE_LANE, Kind.SAMPLE, args, read_sample, body)

    async def stream(
        self,
        prompt: Tokens,
        *,
        version: Version | str = "base",
        n: int = 1,
        max_tokens: int = 128,
        stop: Sequence[str] | Sequence[int] | None = None,
        **params: Any,
    ) -> AsyncIterator[Part]:
        """As `sample` (params: temperature, top_k, top_p, seed), yielding tokens as they are sampled; `index` of a part
        tells its sample. Leaving the loop early stops the sampling. Raises what ended it, Cancelled included."""
        args = {
            "version": version.name if isinstance(version, Version) else version,
            "n": n,
            "max_tokens": max_tokens,
            "stream": True,
            **_stop_args(stop),
            **params,
        }
        parse_args(Kind.SAMPLE, args)
        command = Command(id=new_id(), model=SAMPLE_LANE, kind=Kind.SAMPLE, seq=-1, args=args)
        told = [Told(index) for index in range(n)]
        over = False
        try:
            async for item in self._inbox.stream(command, encode({"prompt": np.asarray(prompt, dtype=np.int32)})):
                if isinstance(item, list):
                    fresh = [told[part.index].take(part) for part in item]
                else:
                    over = True
                    event, body = item
                    if event.error is not None:
                        raise TinsmithError.from_wire(event.error)
                    fresh = [told[part.index].rest(part) for part in wholes(event, body)]
                for part in fresh:
                    if part is not None:
                        yield part
        except (GeneratorExit, asyncio.CancelledError):
            if not over:
                self._send(CONTROL_LANE, Kind.CANCEL, {"command": command.id}, read_plain)
            raise

    async def cancel(self, pending: Pending[SampleResult] | str) -> bool:
        """Stop sampling that is wanted no more (a call, or its command's id) and free its place; it then fails with
        Cancelled. False when it had ended by itself. Raises InvalidInput for a command of a model."""
        command = pending if isinstance(pending, str) else pending.command.id
        done = await self._send(CONTROL_LANE, Kind.CANCEL, {"command": command}, read_plain)
        return bool(done.event.result["cancelled"])

    def events(
        self, models: Sequence[str] | None = None, *, since: str | Mapping[str, str] = "$"
    ) -> AsyncIterator[Streamed | Gap]:
        """Events of these models (None: of all, also those yet to come), each with the `id` to go on from.

        since: "$" from now on, "0" from the beginning, or model -> id after which to go on.
        Where retention has dropped events that were not read, a Gap with the exact count stands in their place.
        """
        return self._bus.events(models, since)

    async def result(self, command: str) -> Completion | None:
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
        reply: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        # A cancel must not overtake its object, so both lanes have one sender.
        queue = SAMPLE_LANE if model in LANES else model
        if queue not in self._senders:
            self._senders[queue] = Sender(self._bus, self._inbox, self._submit_timeout)
        try:
            parse_args(kind, command.args)
        except TinsmithError as error:
            reply.set_exception(error.at(model=model, command=command.id))
        else:
            self._senders[queue].enqueue(command, body, reply)
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


def _stop_args(stop: Sequence[str] | Sequence[int] | None) -> dict[str, Any]:
    if stop is None:
        return {}
    strings = [item for item in stop if isinstance(item, str)]
    tokens = [item for item in stop if not isinstance(item, str)]
    return {"stop_strings": strings, **({"stop_tokens": tokens} if tokens or not stop else {})}


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

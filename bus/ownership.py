"""Ownership: a coordinator's side of the bus. It owns models by lease and epoch, takes commands, completes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith.bus.intake import admit
from tinsmith.bus.protocol.envelope import LANES, Command, Event, Kind
from tinsmith.bus.protocol.errors import BusError, Fenced, LeaseHeld, ProtocolError, UnknownModel
from tinsmith.bus.protocol.headers import pack_event, unpack_command
from tinsmith.bus.redis.blobs import INLINE_BYTES, get_blob, put_blob
from tinsmith.bus.redis.session import Session
from tinsmith.bus.submit import Submitter

RESULT_SECONDS = 3600
EVENT_CAP = 10_000
"""Events of a model that are kept, about."""
_PAGE = 64


@dataclass(frozen=True)
class Taken:
    """One command in the owner's hands."""

    command: Command
    """With the seq that the bus gave it."""
    body: bytes
    entry_id: str
    reply_to: str | None
    attempts: int
    """How often it was delivered, this time included; 0 in the redo log. Take one at a time after `own`, so that a
    command that kills its worker does not raise the count of those behind it."""


class Ownership:
    """Owns models, takes and completes their commands."""

    def __init__(
        self,
        session: Session,
        producer: Submitter,
        result_seconds: int = RESULT_SECONDS,
        event_cap: int = EVENT_CAP,
    ) -> None:
        self._session = session
        self._producer = producer
        self._ttl = result_seconds
        self._event_cap = event_cap
        self._bell = session.new_wire()
        self._cursors: dict[str, tuple[int, str]] = {}
        self._taking: dict[str, asyncio.Lock] = {}

    async def bell(self, after: str, block_ms: int) -> tuple[list[str], str]:
        """Models whose doorbell rang after `after` (an id from the call before, `0`, or `$` for now), and the new id.

        Commands of foreign programs that wait at the door are admitted on the way. Returns no models when nothing came
        within `block_ms`. The bell is a hint: look at `models_with_backlog` when you begin and now and then. Raises
        BusUnreachable when the server is silent, BusLost.
        """
        keys = self._session.keys
        if after == "$":
            (last,) = await self._session.call(("XREVRANGE", keys.bell, "+", "-", "COUNT", 1))
            after = last[0][0].decode() if last else "0-0"
        # The door is read from its beginning: what was admitted is deleted from it.
        command = ("XREAD", "COUNT", _PAGE, "BLOCK", max(block_ms, 1), "STREAMS", keys.bell, keys.door, after, "0")
        reply = await self._session.block(self._bell, block_ms, *command)
        if not reply:
            await self._session.check_life()
            return [], after
        found = {stream.decode(): entries for stream, entries in reply}
        rung = found.get(keys.bell, [])
        names = [fields_of(entry)["m"].decode() for entry in rung]
        names += await admit(self._session, self._producer, found.get(keys.door, []))
        return list(dict.fromkeys(names)), rung[-1][0].decode() if rung else after

    async def all_models(self) -> list[str]:
        """Names of every queue, the sampling lane included once it was used, unloaded ones until they are freed."""
        (members,) = await self._session.call(("SMEMBERS", self._session.keys.models))
        return sorted(member.decode() for member in members)

    async def models_with_backlog(self) -> list[str]:
        """Queues that hold commands which are not completed."""
        names = await self.all_models()
        if not names:
            return []
        counts = await self._session.call(*(("HGET", self._session.keys.meta(name), "backlog") for name in names))
        return [name for name, count in zip(names, counts, strict=True) if int(count or 0) > 0]

    async def own(self, model: str, owner: str, lease_ms: int) -> int:
        """Take a model for `lease_ms` by the server's clock; returns the epoch, higher than any before.

        `owner` must be unique to this process. Raises LeaseHeld, UnknownModel.
        """
        keys = self._session.keys
        reply = await self._session.script(
            "own",
            [keys.meta(model), keys.commands(model), keys.events(model), keys.models, keys.epoch],
            model,
            owner,
            lease_ms,
            int(model in LANES),
        )
        if reply[0] == "HELD":
            raise LeaseHeld(
                f"owned by {reply[1].decode()!r} for {reply[2] / 1000:.1f} s more",
                remedy="Wait until its lease has run out.",
                model=model,
            )
        if reply[0] == "UNKNOWN":
            raise UnknownModel("no model of that name has a queue", model=model)
        epoch = int(reply[1])
        self._cursors[model] = (epoch, "0")
        return epoch

    async def renew(
        self, models: Sequence[str], owner: str, epochs: Mapping[str, int] | Sequence[int], lease_ms: int
    ) -> None:
        """Prolong the leases of many models in one round trip. `epochs` is by model, or in the order of `models`.

        Raises Fenced naming every model that has another owner by now; the others are renewed all the same.
        """
        held = dict(epochs) if isinstance(epochs, Mapping) else dict(zip(models, epochs, strict=True))
        runs = [("renew", [self._session.keys.meta(model)], [held[model], lease_ms]) for model in models]
        replies = await self._session.scripts(runs) if runs else []
        fenced = [model for model, reply in zip(models, replies, strict=True) if isinstance(reply, Fenced)]
        for reply in replies:
            if isinstance(reply, BusError) and not isinstance(reply, Fenced):
                raise reply
        if fenced:
            raise Fenced(
                f"{owner!r} no longer owns {', '.join(fenced)}", remedy="Stop working on them.", model=fenced[0]
            )

    async def release(self, model: str, owner: str, epoch: int) -> None:
        """Give a model back before its lease ends. Raises Fenced when `owner` does not hold it any more."""
        await self._fenced_script("release", model, [self._session.keys.meta(model)], epoch)
        self._cursors.pop(model, None)

    async def next(self, model: str, epoch: int, count: int = 1, *, replay: bool = False) -> list[Taken]:
        """Up to `count` commands: those taken before and not completed first (all of them with `replay`, or right after
        `own`), then new ones, oldest first. Never waits. Raises Fenced, ProtocolError for an entry that can't be read.
        """
        # Two at once would start from the same cursor and take the same commands.
        async with self._taking.setdefault(model, asyncio.Lock()):
            return await self._next(model, epoch, count, replay)

    async def _next(self, model: str, epoch: int, count: int, replay: bool) -> list[Taken]:
        keys = self._session.keys
        held, cursor = self._cursors.get(model, (epoch, "0"))
        if replay or held != epoch:
            cursor = "0"
        reply = await self._fenced_script(
            "next", model, [keys.meta(model), keys.commands(model)], epoch, cursor, max(count, 1)
        )
        taken = [await self._taken(model, entry, fields, deliveries) for entry, deliveries, fields in reply[1]]
        # Only now: when this call is cut short, the same commands come again.
        if taken:
            self._cursors[model] = (epoch, taken[-1].entry_id)
        return taken

    async def complete(
        self, model: str, epoch: int, entry_id: str, event: Event, body: bytes = b"", keep: bool = False
    ) -> int:
        """End a command with its event and the result's body, all in one step; returns the event's number.

        keep leaves the command in its stream as redo log. A successful unload, and a failed create_model, close the
        queue in the same step: call `remove_model` after it. Repeating is safe. Raises Fenced, ProtocolError when the
        command is not the next of its model.
        """
        return await self._end(model, epoch, entry_id, event, body, keep, dead=False)

    async def give_up(self, model: str, epoch: int, entry_id: str, event: Event) -> int:
        """As `complete`, for a command that can't be done: a copy goes to the stream of the dead, with the event."""
        return await self._end(model, epoch, entry_id, event, b"", False, dead=True)

    async def trim(self, model: str, epoch: int, upto_seq: int) -> int:
        """Record a durable snapshot at `upto_seq` and delete the redo log up to it; returns the entries deleted.

        Raises Fenced, ProtocolError when `upto_seq` is not completed yet.
        """
        keys = self._session.keys
        deleted = 0
        while True:
            reply = await self._fenced_script(
                "trim", model, [keys.meta(model), keys.commands(model)], epoch, upto_seq, 256, keys.blob_prefix
            )
            if reply[0] == "AHEAD":
                raise ProtocolError(f"can't trim to seq {upto_seq}: only {reply[1]} is completed", model=model)
            deleted += int(reply[1])
            if not reply[2]:
                return deleted

    async def redo_log(self, model: str) -> AsyncIterator[Taken]:
        """Completed commands that were kept and are newer than the snapshot's position, in order."""
        keys = self._session.keys
        (meta,) = await self._session.call(("HMGET", keys.meta(model), "snapshot", "applied"))
        snapshot, applied = (int(value) if value is not None else -1 for value in meta)
        start = "-"
        while True:
            (page,) = await self._session.call(("XRANGE", keys.commands(model), start, "+", "COUNT", _PAGE))
            for entry in page:
                seq = int(fields_of(entry)["seq"])
                if seq > applied:
                    return
                if seq > snapshot:
                    yield await self._taken(model, entry[0], entry[1], 0)
            if len(page) < _PAGE:
                return
            start = "(" + page[-1][0].decode()

    async def remove_model(self, model: str, epoch: int) -> None:
        """Let go of an unloaded model: answer whatever still waits in its queue with UnknownModel, then free it.

        Later submits get UnknownModel; the name may be created again. Repeating after a crash is safe. Raises Fenced.
        """
        keys = self._session.keys
        heads = [keys.meta(model), keys.commands(model), keys.parked(model)]
        error = UnknownModel("the model was unloaded before this command's turn", model=model)
        await self._fenced_script("drain", model, heads, epoch, keys.record_prefix)
        while True:
            for left in await self.next(model, epoch, _PAGE, replay=True):
                event = Event(
                    id=left.command.id,
                    model=model,
                    kind=left.command.kind,
                    seq=left.command.seq,
                    ok=False,
                    error=error.to_wire(),
                )
                await self.complete(model, epoch, left.entry_id, event)
            (meta,) = await self._session.call(("HMGET", keys.meta(model), "backlog", "applied"))
            if int(meta[0]) == 0:
                break
        await self.trim(model, epoch, int(meta[1]))
        await self._fenced_script("free", model, [*heads, keys.events(model), keys.models], epoch, model, self._ttl)
        self._cursors.pop(model, None)
        self._taking.pop(model, None)

    async def _end(
        self, model: str, epoch: int, entry_id: str, event: Event, body: bytes, keep: bool, dead: bool
    ) -> int:
        keys = self._session.keys
        blob = await put_blob(self._session, body, forced=True) if len(body) > INLINE_BYTES else ""
        closes = event.kind is (Kind.UNLOAD if event.ok else Kind.CREATE_MODEL) and model not in LANES
        reply = await self._fenced_script(
            "complete",
            model,
            [
                keys.meta(model),
                keys.commands(model),
                keys.events(model),
                keys.record(event.id),
                keys.event_bell,
                keys.dead,
                keys.blob(blob) if blob else keys.incarnation,
            ],
            epoch,
            entry_id,
            event.id,
            pack_event(event.model_copy(update={"body_bytes": len(body)})),
            b"" if blob else body,
            blob,
            len(body),
            int(keep),
            self._ttl,
            self._event_cap,
            int(model in LANES),
            int(dead),
            int(closes),
            keys.inbox(""),
            keys.blob_prefix,
            first=model,
        )
        if reply[0] == "OK":
            return int(reply[1])
        reasons = {
            "GONE": "the bus has no record of it",
            "ENTRY": "it stands in another entry",
            "BLOB": "its result's blob is gone",
            "ORDER": f"its model stands at {reply[1:]} (applied, this seq): it is not the next one",
        }
        raise ProtocolError(
            f"can't be completed: {reasons.get(reply[0], reply[0])}",
            remedy="Complete a model's commands in the order in which `next` gave them.",
            model=model,
            command=event.id,
        )

    async def _fenced_script(
        self, name: str, model: str, keys: Sequence[str], epoch: int, *args: Any, first: str | None = None
    ) -> list[Any]:
        head = [epoch] if first is None else [first, epoch]
        try:
            return await self._session.script(name, keys, *head, *args)
        except Fenced as error:
            raise error.at(model=model) from None

    async def _taken(self, model: str, entry: bytes, fields: list[bytes], deliveries: int) -> Taken:
        values = fields_of([entry, fields])
        try:
            command = unpack_command(values["header"], int(values["seq"]))
            body = values.get("body", b"")
            if values.get("blob"):
                body = await get_blob(self._session, values["blob"].decode(), int(values["size"]))
        except ProtocolError as error:
            raise error.at(model=model, command=values.get("id", b"").decode()) from None
        return Taken(command, body, entry.decode(), values.get("reply_to", b"").decode() or None, deliveries)


def fields_of(entry: Sequence[Any]) -> dict[str, bytes]:
    """The fields of a stream entry [id, [name, value, ...]] by name."""
    names, values = entry[1][::2], entry[1][1::2]
    return {name.decode(): value for name, value in zip(names, values, strict=True)}

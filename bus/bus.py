"""Bus: everything a program does on the bus, and the layout that a program in another language needs.

Keys carry the hash tag of the bus: `{tinsmith}:` and then

    m:<model>:cmd    stream  commands   fields id, seq, header, reply_to, and body or (blob, size)
    m:<model>:evt    stream  events     fields id, n, seq, kind, at, header; entry id <birth ms>-<n>
    in:<client>      stream  results    fields id, n, seq, header, size, and body up to 256 kB; or id and parts
    c:<command id>   hash    record     state (parked, queued, done), seq, n, event, rsize, rbody or rblob; kept an hour
    b:<blob id>      hash    blob       0, 1, 2 ...: chunks of 4 MiB
    m:<model>:meta   hash    state, born, seq, applied, snapshot, backlog, n, owner, epoch, lease
    bell, ebell      streams hints: field m is a model with a new command, a new event
    dead             stream  commands given up: model, id, seq, command (header), event (header)
    inc, ver, epoch  strings incarnation, protocol version, last epoch
    models           set     models that have a queue

A command's header is a msgpack map: v = 1, id, model, kind, seq, args, lengths, submitted (envelope.Command; missing
fields take their defaults, unknown ones are refused). An event's header likewise (envelope.Event); the number n and the
seq that stand beside it in the entry replace those in the header. A body is a frame (codec). `at` is in Unix ms.

To submit from any language: XADD {tinsmith}:door * header <msgpack> body <frame> reply_to <client>, where client is any
name of your own (letters, digits, . _ -). The result comes to {tinsmith}:in:<client>, which you XREAD from 0 and XDEL;
so does the refusal of a command that is not accepted, as an event with ok false and n 0. The command id makes it safe
to XADD the same command again. To follow a model: XREAD BLOCK its evt stream from 0, $ or any entry id.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from redis.exceptions import ResponseError

from tinsmith.bus.events import Streamed, read_events
from tinsmith.bus.inbox import Completion, Inbox, result_of
from tinsmith.bus.ownership import EVENT_CAP, RESULT_SECONDS, Ownership
from tinsmith.bus.protocol.errors import Gap
from tinsmith.bus.protocol.parts import Part, pack_parts
from tinsmith.bus.redis.session import Session
from tinsmith.bus.submit import BACKLOG_CAP, Submitted, Submitter

__all__ = ["Bus", "Info", "Submitted"]


@dataclass(frozen=True)
class Info:
    """What the server is, for /health. Empty strings: the server does not tell."""

    server: str
    """redis or valkey."""
    version: str
    """Its own version."""
    compatible: str
    """The Redis version whose commands it has."""
    eviction: str
    """maxmemory-policy."""
    appendonly: bool
    appendfsync: str
    used_bytes: int
    max_bytes: int
    """0: no limit."""
    incarnation: str


class Bus(Submitter, Ownership):
    """A program's door to one bus. Made by `open_bus`; use as an async context manager, or call `close`."""

    def __init__(
        self,
        session: Session,
        *,
        backlog_cap: int = BACKLOG_CAP,
        result_seconds: int = RESULT_SECONDS,
        event_cap: int = EVENT_CAP,
    ) -> None:
        Submitter.__init__(self, session, backlog_cap)
        Ownership.__init__(self, session, self, result_seconds, event_cap)

    @property
    def incarnation(self) -> str:
        """The random id of this life of the server's data."""
        return self._session.incarnation.decode()

    @property
    def session(self) -> Session:
        """The connections underneath, for tests and tools."""
        return self._session

    async def close(self) -> None:
        """Close every connection; inboxes are closed by their owners before it."""
        await self._session.close()

    async def __aenter__(self) -> Bus:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def inbox(self, name: str | None = None, keep_seconds: float = 0.0) -> Inbox:
        """A reader of results for this process; `async with bus.inbox() as inbox`. keep_seconds: see Inbox."""
        return Inbox(self._session, self, name, keep_seconds)

    async def result(self, command_id: str) -> Completion | None:
        """The event and body of a done command while they are kept (the body only until its readers have it).

        None while it is not done, and for an id that the bus does not know.
        """
        reply = await self._session.script("attach", [self._session.keys.record(command_id)], "")
        return await result_of(self._session, reply) if reply[0] == "DONE" else None

    def events(
        self, models: Sequence[str] | None = None, since: str | Mapping[str, str] = "$"
    ) -> AsyncIterator[Streamed | Gap]:
        """Events live or replayed; see `read_events`."""
        return read_events(self._session, models, since)

    async def put_parts(self, reader: str, command_id: str, parts: Sequence[Part]) -> None:
        """Send parts of a result that is not whole yet to a reader's inbox, in order. Raises BusUnreachable, BusLost.

        They go with the results' time if nobody reads them.
        """
        inbox = self._session.keys.inbox(reader)
        entry = ("XADD", inbox, "*", "id", command_id, "parts", pack_parts(parts))
        await self._session.call(entry, ("EXPIRE", inbox, self._ttl))

    async def stands(self, command_id: str) -> tuple[str, str] | None:
        """The queue of a command and its state there (parked, queued, done); None when the bus does not know it."""
        (found,) = await self._session.call(("HMGET", self._session.keys.record(command_id), "model", "state"))
        return (found[0].decode(), found[1].decode()) if found[0] is not None else None

    async def backlog(self, model: str) -> int:
        """Commands of a model that wait or run; those that came early and wait for a gap to close not counted."""
        (count,) = await self._session.call(("HGET", self._session.keys.meta(model), "backlog"))
        return int(count or 0)

    async def meta(self, model: str) -> dict[str, str]:
        """The model's position: state (live, unloaded, freed), born, seq, applied, snapshot, backlog, n, owner, epoch.

        Empty for a model that never was.
        """
        (reply,) = await self._session.call(("HGETALL", self._session.keys.meta(model)))
        return {name.decode(): value.decode() for name, value in zip(reply[::2], reply[1::2], strict=True)}

    async def info(self) -> Info:
        """Version, eviction policy, effective persistence and memory of the server."""
        text, *settings = await self._session.call(
            ("INFO",), ("CONFIG", "GET", "maxmemory-policy"), ("CONFIG", "GET", "appendfsync"), errors=True
        )
        if isinstance(text, ResponseError):
            raise text
        lines = (line.partition(":") for line in text.decode().splitlines() if ":" in line)
        facts = {name: value for name, _, value in lines}
        # Hosted servers forbid CONFIG; INFO tells the policy, nothing tells appendfsync.
        policy, fsync = (
            "" if isinstance(reply, ResponseError) or not reply else reply[1].decode() for reply in settings
        )
        aof = facts.get("aof_enabled") == "1"
        return Info(
            server="valkey" if "valkey_version" in facts else "redis",
            version=facts.get("valkey_version", facts["redis_version"]),
            compatible=facts["redis_version"],
            eviction=policy or facts.get("maxmemory_policy", ""),
            appendonly=aof,
            appendfsync=fsync if aof else "",
            used_bytes=int(facts["used_memory"]),
            max_bytes=int(facts["maxmemory"]),
            incarnation=self.incarnation,
        )

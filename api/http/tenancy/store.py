"""The HTTP gateway's memory, on the bus beside the streams: every replica sees the same, and none has to survive.

Keys, after the hash tag of the bus:

    http:session:<id> http:model:<id> http:sampler:<id>   strings  records (records.py) as JSON
    http:refused:<request id>                             string   the error of a request that was refused, for an hour
    http:project:<session>                                string   the project it was moved into
    http:finish:<session>                                 string   how its client said good-bye: FinishRecord as JSON
    http:sessions                                         zset     session -> Unix seconds of its making, over or not
    http:seen                                             zset     session -> Unix seconds of its last heartbeat
    http:finished                                         set      sessions that live and whose client said good-bye
    http:joined:<sampler>                                 string   how many clients joined it, the first not counted
    http:models                                           zset     model -> Unix seconds of its making
    http:models:<session> http:samplers:<session>         sets     what belongs to a session
    http:chore:<chore>                                    string   there while a replica does it
    http:secret                                           string   what addresses for downloads are signed with
    http:saves:<model>                                    hash     kind/name -> SaveRecords as JSON, oldest first

A session that is over is remembered as long as it has training runs, and KEPT_SECONDS more.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import TypeVar

from tinsmith.api.http.tenancy.names import session_of
from tinsmith.api.http.tenancy.records import (
    DEFAULT_PROJECT,
    FinishRecord,
    ModelRecord,
    Record,
    SamplerRecord,
    SaveRecord,
    SessionRecord,
)
from tinsmith.bus.bus import Bus
from tinsmith.bus.protocol.errors import TinsmithError

R = TypeVar("R", bound=Record)

KEYS = {
    "http:session:<session>": "string: record of a session",
    "http:model:<model>": "string: record of a training run",
    "http:sampler:<sampler>": "string: record of a sampling session",
    "http:refused:<request>": "string: the error of a request that was refused",
    "http:project:<session>": "string: the project that a session was moved into",
    "http:finish:<session>": "string: how a session's client said good-bye",
    "http:joined:<sampler>": "string: how many clients joined a sampling session, the first not counted",
    "http:secret": "string: what addresses for downloads are signed with",
    "http:chore:<chore>": "string: a replica does this chore now",
    "http:sessions": "zset: session -> Unix seconds of its making, over or not",
    "http:seen": "zset: session -> Unix seconds of its last heartbeat",
    "http:finished": "set: sessions that live and whose client said good-bye",
    "http:models": "zset: model -> Unix seconds of its making",
    "http:models:<session>": "set: models of a session",
    "http:samplers:<session>": "set: sampling sessions of a session",
    "http:saves:<model>": "hash: kind/name -> what clients said of checkpoints and versions",
}
"""The same for whoever lists the bus: name after the bus's prefix -> what it is."""

REFUSAL_SECONDS = 3600
KEPT_SECONDS = 7 * 86400
CACHED = 20_000
"""Records that one replica keeps at hand; they do not change once written."""


class Store:
    """Reads and writes the keys above."""

    def __init__(self, bus: Bus) -> None:
        self._call = bus.session.call
        self._prefix = bus.session.keys.prefix + "http:"
        self._cache: dict[str, Record] = {}

    async def put_session(self, session: str, record: SessionRecord, *, living: bool = True) -> None:
        """A new session, seen now; or one that is over from the beginning, to hold a training run."""
        seen = [("ZADD", self._key("seen"), record.created, session)] if living else []
        await self._call(
            ("SET", self._key("session", session), record.model_dump_json()),
            ("ZADD", self._key("sessions"), record.created, session),
            *seen,
        )

    async def session(self, session: str) -> SessionRecord | None:
        """The session, over or not; None when it never was, or is no longer remembered."""
        return await self._get("session", session, SessionRecord)

    async def heartbeat(self, session: str, now: float) -> bool:
        """Note that its client lives; False when the session is over."""
        key = self._key("seen")
        _, score = await self._call(("ZADD", key, "XX", now, session), ("ZSCORE", key, session))
        return score is not None

    async def finish(self, session: str, how: FinishRecord | None = None) -> None:
        """Its client said good-bye; others may still use it."""
        text = (how or FinishRecord()).model_dump_json()
        await self._call(("SADD", self._key("finished"), session), ("SET", self._key("finish", session), text))

    async def move(self, session: str, project: str) -> None:
        """Into another project, with all that is its own."""
        await self._call(("SET", self._key("project", session), project))

    async def project(self, session: str) -> str:
        """Where a session is now."""
        (moved,) = await self._call(("GET", self._key("project", session)))
        if moved is not None:
            return str(moved.decode())
        record = await self.session(session)
        return record.project if record is not None else DEFAULT_PROJECT

    async def remembered(self) -> list[tuple[str, SessionRecord, FinishRecord | None, bool]]:
        """Every session that is remembered, in its present project; how its client ended it, and whether it lives."""
        found, seen = await self._call(
            ("ZREVRANGE", self._key("sessions"), 0, -1), ("ZRANGE", self._key("seen"), 0, -1)
        )
        names, living = [name.decode() for name in found], {name.decode() for name in seen}
        if not names:
            return []
        kinds = ("session", "project", "finish")
        replies = await self._call(*(("MGET", *(self._key(kind, name) for name in names)) for kind in kinds))
        sessions, gone = [], []
        for name, text, project, finish in zip(names, *replies, strict=True):
            if text is None:
                gone.append(name)
                continue
            record = SessionRecord.model_validate_json(text)
            if project is not None:
                record = record.model_copy(update={"project": project.decode()})
            how = FinishRecord.model_validate_json(finish) if finish is not None else None
            sessions.append((name, record, how, name in living))
        if gone:
            await self._call(("ZREM", self._key("sessions"), *gone))
        return sessions

    async def sessions(self) -> list[str]:
        """Sessions that live, the newest heartbeat first."""
        (found,) = await self._call(("ZREVRANGE", self._key("seen"), 0, -1))
        return [name.decode() for name in found]

    async def silent(self, before: float, finished_before: float) -> list[str]:
        """Sessions without a heartbeat since `before`, and finished ones without one since `finished_before`."""
        old, older, finished = await self._call(
            ("ZRANGEBYSCORE", self._key("seen"), "-inf", finished_before),
            ("ZRANGEBYSCORE", self._key("seen"), "-inf", before),
            ("SMEMBERS", self._key("finished")),
        )
        over = set(older) | (set(old) & set(finished))
        return sorted(name.decode() for name in over)

    async def end_session(self, session: str) -> None:
        """It is over, and its samplers are forgotten; its models' records stay for their checkpoints."""
        samplers = await self.samplers(session)
        keys = [self._key("sampler", sampler) for sampler in samplers]
        await self._call(
            ("DEL", self._key("samplers", session), *keys, *(self._key("joined", sampler) for sampler in samplers)),
            ("ZREM", self._key("seen"), session),
            ("SREM", self._key("finished"), session),
        )
        for key in keys:
            self._cache.pop(key, None)
        await self._expire_unless_used(session)

    async def _expire_unless_used(self, session: str) -> None:
        """Let a session that is over be forgotten after a while, when no training run is left of it."""
        runs, seen = await self._call(("SCARD", self._key("models", session)), ("ZSCORE", self._key("seen"), session))
        if not runs and seen is None:
            kinds = ("session", "project", "finish")
            await self._call(*(("EXPIRE", self._key(kind, session), KEPT_SECONDS) for kind in kinds))

    async def last_seen(self, session: str) -> float | None:
        """Unix seconds of its last heartbeat; None when it is over."""
        (score,) = await self._call(("ZSCORE", self._key("seen"), session))
        return float(score) if score is not None else None

    async def put_model(self, model: str, record: ModelRecord) -> None:
        """A model that is being made; the first to write it owns it, so see first whose its name is."""
        await self._call(
            ("SET", self._key("model", model), record.model_dump_json(), "NX"),
            ("ZADD", self._key("models"), "NX", record.created, model),
            ("SADD", self._key("models", session_of(model)), model),
        )

    async def model(self, model: str) -> ModelRecord | None:
        """The training run, whether its model is loaded or not."""
        return await self._get("model", model, ModelRecord)

    async def drop_model(self, model: str) -> None:
        """Forget a training run and what was said of its saves."""
        await self._call(
            ("DEL", self._key("model", model), self._key("saves", model)),
            ("ZREM", self._key("models"), model),
            ("SREM", self._key("models", session_of(model)), model),
        )
        self._cache.pop(self._key("model", model), None)
        await self._expire_unless_used(session_of(model))

    async def models(self, session: str | None = None) -> list[str]:
        """Training runs, newest first; or those of one session."""
        if session is not None:
            (found,) = await self._call(("SMEMBERS", self._key("models", session)))
            return sorted(name.decode() for name in found)
        (found,) = await self._call(("ZREVRANGE", self._key("models"), 0, -1))
        return [name.decode() for name in found]

    async def put_sampler(self, sampler: str, record: SamplerRecord) -> None:
        """A new sampling session."""
        await self._call(
            ("SET", self._key("sampler", sampler), record.model_dump_json()),
            ("SADD", self._key("samplers", session_of(sampler)), sampler),
        )

    async def sampler(self, sampler: str) -> SamplerRecord | None:
        """The sampling session; None when it never was, or its session is over."""
        return await self._get("sampler", sampler, SamplerRecord)

    async def join(self, sampler: str) -> int:
        """A number for one more client of a sampling session: 1, 2, ...; the one that made it is 0."""
        (number,) = await self._call(("INCR", self._key("joined", sampler)))
        return int(number)

    async def samplers(self, session: str) -> list[str]:
        """Sampling sessions of a session."""
        (found,) = await self._call(("SMEMBERS", self._key("samplers", session)))
        return sorted(name.decode() for name in found)

    async def sampled(self) -> frozenset[str]:
        """Versions (model/name) that sampling sessions of living sessions are over."""
        found = [await self.sampler(it) for session in await self.sessions() for it in await self.samplers(session)]
        return frozenset(sampler.version for sampler in found if sampler is not None)

    async def saves(self, model: str) -> dict[str, list[SaveRecord]]:
        """`kind/name` -> what was said of it, oldest first."""
        (reply,) = await self._call(("HGETALL", self._key("saves", model)))
        pairs = zip(reply[::2], reply[1::2], strict=True)
        return {name.decode(): [SaveRecord.model_validate(it) for it in json.loads(text)] for name, text in pairs}

    async def put_saves(self, model: str, checkpoint_id: str, records: Sequence[SaveRecord]) -> None:
        """Replace what was said of one checkpoint; nothing left forgets it."""
        key = self._key("saves", model)
        if records:
            text = json.dumps([record.model_dump() for record in records])
            await self._call(("HSET", key, checkpoint_id, text))
        else:
            await self._call(("HDEL", key, checkpoint_id))

    async def forget_save(self, model: str, request: str) -> None:
        """Forget what was said of a save that failed: what takes its name later is another one's."""
        seq = request.rpartition(":")[2]
        for checkpoint_id, records in (await self.saves(model)).items():
            kept = [record for record in records if str(record.seq) != seq]
            if len(kept) < len(records):
                await self.put_saves(model, checkpoint_id, kept)

    async def put_refusal(self, request: str, error: TinsmithError) -> None:
        """Why a request never became a command."""
        await self._call(("SET", self._key("refused", request), json.dumps(error.to_wire()), "EX", REFUSAL_SECONDS))

    async def refusal(self, request: str) -> TinsmithError | None:
        """Why; None when it is no longer kept."""
        (text,) = await self._call(("GET", self._key("refused", request)))
        return TinsmithError.from_wire(json.loads(text)) if text is not None else None

    async def secret(self) -> bytes:
        """What addresses are signed with, the same for all replicas."""
        key = self._key("secret")
        _, secret = await self._call(("SET", key, secrets.token_hex(32), "NX"), ("GET", key))
        return bytes(secret)

    async def claim(self, chore: str, seconds: int) -> bool:
        """Whether this replica does the chore this time; no other one gets it for `seconds`."""
        (reply,) = await self._call(("SET", self._key("chore", chore), "1", "NX", "EX", seconds))
        return reply is not None

    def _key(self, *parts: str) -> str:
        return self._prefix + ":".join(parts)

    async def _get(self, kind: str, name: str, cls: type[R]) -> R | None:
        key = self._key(kind, name)
        held = self._cache.get(key)
        if isinstance(held, cls):
            return held
        (text,) = await self._call(("GET", key))
        if text is None:
            return None
        record = cls.model_validate_json(text)
        if len(self._cache) >= CACHED:
            self._cache.clear()
        self._cache[key] = record
        return record

"""The HTTP door's memory, on the bus beside the streams, so that every replica sees the same and none has to survive.

Keys, after the hash tag of the bus:

    http:session:<id> http:model:<id> http:sampler:<id>   strings  records (records.py) as JSON
    http:refused:<request id>                             string   the error of a request that was refused, for an hour
    http:seen                                             zset     session -> Unix seconds of its last heartbeat
    http:finished                                         set      sessions whose client said good-bye
    http:models                                           zset     model -> Unix seconds of its making
    http:models:<session> http:samplers:<session>         sets     what belongs to a session
    http:saves:<model>                                    hash     kind/name -> SaveRecords as JSON, oldest first
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypeVar

from tinsmith.api.http.names import session_of
from tinsmith.api.http.records import ModelRecord, Record, SamplerRecord, SaveRecord, SessionRecord
from tinsmith.bus.errors import TinsmithError
from tinsmith.bus.streams import Bus

R = TypeVar("R", bound=Record)

REFUSAL_SECONDS = 3600
CACHED = 20_000
"""Records that one replica keeps at hand; they do not change once written."""


class Store:
    """Reads and writes the keys above."""

    def __init__(self, bus: Bus) -> None:
        self._call = bus.session.call
        self._prefix = bus.session.keys.prefix + "http:"
        self._cache: dict[str, Record] = {}

    async def put_session(self, session: str, record: SessionRecord) -> None:
        """A new session, seen now."""
        await self._call(
            ("SET", self._key("session", session), record.model_dump_json()),
            ("ZADD", self._key("seen"), record.created, session),
        )

    async def session(self, session: str) -> SessionRecord | None:
        """The session; None when it never was, or is over."""
        return await self._get("session", session, SessionRecord)

    async def heartbeat(self, session: str, now: float) -> bool:
        """Note that its client lives; False when the session is over."""
        (score,) = await self._call(("ZSCORE", self._key("seen"), session))
        if score is None:
            return False
        await self._call(("ZADD", self._key("seen"), "XX", now, session))
        return True

    async def finish(self, session: str) -> None:
        """Its client said good-bye; others may still use it."""
        await self._call(("SADD", self._key("finished"), session))

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
        """Forget a session and its samplers; its models' records stay for their checkpoints."""
        samplers = await self.samplers(session)
        keys = [self._key("sampler", sampler) for sampler in samplers]
        await self._call(
            (
                "DEL",
                self._key("session", session),
                self._key("samplers", session),
                self._key("models", session),
                *keys,
            ),
            ("ZREM", self._key("seen"), session),
            ("SREM", self._key("finished"), session),
        )
        for key in [self._key("session", session), *keys]:
            self._cache.pop(key, None)

    async def last_seen(self, session: str) -> float | None:
        """Unix seconds of its last heartbeat; None when it is over."""
        (score,) = await self._call(("ZSCORE", self._key("seen"), session))
        return float(score) if score is not None else None

    async def put_model(self, model: str, record: ModelRecord) -> None:
        """A model that is being made; writing it again changes nothing that matters."""
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

    async def samplers(self, session: str) -> list[str]:
        """Sampling sessions of a session."""
        (found,) = await self._call(("SMEMBERS", self._key("samplers", session)))
        return sorted(name.decode() for name in found)

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

    async def put_refusal(self, request: str, error: TinsmithError) -> None:
        """Why a request never became a command."""
        await self._call(("SET", self._key("refused", request), json.dumps(error.to_wire()), "EX", REFUSAL_SECONDS))

    async def refusal(self, request: str) -> TinsmithError | None:
        """Why; None when it is no longer kept."""
        (text,) = await self._call(("GET", self._key("refused", request)))
        return TinsmithError.from_wire(json.loads(text)) if text is not None else None

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

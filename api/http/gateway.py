"""One replica's hold on the bus: it puts requests there as commands, and waits for what became of them.

Invariants: a request's id is its command's id, so that a repeated request is the same command, whichever replica takes
it; a turn in a model's order that was announced is never left open: what can't be carried out is submitted all the
same, refused, and fails in its place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from starlette.requests import Request

from tinsmith.api.http.finished_samples import Completions
from tinsmith.api.http.retention.catalog import look
from tinsmith.api.http.settings import HttpSettings
from tinsmith.api.http.tenancy.auth import owner_of
from tinsmith.api.http.tenancy.names import REFUSED_PREFIX, TinkerPath, owner_in, refused_id, session_of
from tinsmith.api.http.tenancy.records import ModelRecord, SessionRecord
from tinsmith.api.http.tenancy.store import Store
from tinsmith.bus.bus import Bus
from tinsmith.bus.connection import open_bus
from tinsmith.bus.inbox import Completion, Inbox
from tinsmith.bus.protocol.commands import REFUSED, parse_args
from tinsmith.bus.protocol.envelope import CONTROL_LANE, Command, Event, Kind, new_id
from tinsmith.bus.protocol.errors import (
    CommandConflict,
    InvalidInput,
    ModelExists,
    SeqConflict,
    TinsmithError,
    UnknownCommand,
    UnknownModel,
    UnknownVersion,
)
from tinsmith.bus.status import get_status

log = logging.getLogger("tinsmith.http")


class Gateway:
    """Made by `Gateway.open` in each replica; holds connections and caches, no state."""

    def __init__(self, settings: HttpSettings, bus: Bus, inbox: Inbox) -> None:
        self.settings = settings
        self.bus = bus
        self.inbox = inbox
        self.store = Store(bus)
        self.completions = Completions(bus)
        self.opened = time.time()
        self._context: int | None = None
        self._chores: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, settings: HttpSettings) -> Gateway:
        """Raises BusUnreachable."""
        bus = await open_bus(settings.bus_url, settings.bus)
        gateway = cls(settings, bus, await bus.inbox(keep_seconds=settings.keep_seconds).start())
        gateway.completions.start()
        return gateway

    async def close(self) -> None:
        """Let go of the bus; whoever still waits is told to ask again."""
        await self.completions.close()
        for chore in list(self._chores):
            chore.cancel()
        await self.inbox.close()
        await self.bus.close()

    async def submit(self, command: Command, body: bytes = b"", error: TinsmithError | None = None) -> str:
        """Put a request on the bus; returns the id of its future, whose failure tells whatever is wrong with it.

        error: why the request can't be carried out, where that is known already. Raises Busy, BusUnreachable, BusLost.
        """
        try:
            if error is None:
                parse_args(command.kind, command.args)
        except InvalidInput as wrong:
            error = wrong
        if error is not None:
            # A batch needs a length to be planned, so that its refusal and not an empty plan is what the ranks meet.
            lengths = (1,) if command.kind in (Kind.FORWARD, Kind.FORWARD_BACKWARD) else ()
            command = command.model_copy(update={"args": {REFUSED: error.to_wire()}, "lengths": lengths})
            body = b""
        try:
            await self.inbox.submit(command, body)
        except (CommandConflict, SeqConflict, UnknownModel, ModelExists) as refusal:
            return await self.refuse(error or refusal.at(model=command.model, command=command.id))
        return command.id

    async def refuse(self, error: TinsmithError) -> str:
        """The id of a future that failed before it could become a command."""
        request = refused_id()
        await self.store.put_refusal(request, error)
        return request

    async def cancel(self, request: str) -> None:
        """Have a sample that is wanted no more stopped; nothing waits for it. Raises Busy, BusUnreachable, BusLost."""
        await self.bus.submit(
            Command(id=new_id(), model=CONTROL_LANE, kind=Kind.CANCEL, seq=-1, args={"command": request})
        )

    def cancel_soon(self, request: str) -> None:
        """As `cancel`, from where nothing can be awaited any more."""
        chore = asyncio.get_running_loop().create_task(self.cancel(request))
        self._chores.add(chore)
        chore.add_done_callback(self._chore_done)

    def _chore_done(self, chore: asyncio.Task[None]) -> None:
        self._chores.discard(chore)
        if not chore.cancelled() and (error := chore.exception()) is not None:
            log.warning("a sample that nobody waits for was not stopped: %s", error)

    async def outcome(self, request: str, seconds: float) -> Completion:
        """What became of a request, waited for `seconds`.

        Raises DeadlineExceeded while it is on its way, UnknownCommand when it never was or is no longer kept.
        """
        if not request.startswith(REFUSED_PREFIX):
            return await self.inbox.wait(request, seconds)
        error = await self.store.refusal(request)
        if error is None:
            raise UnknownCommand("no such request, or its refusal is no longer kept", command=request)
        return Event(id=request, model="refused", kind=Kind.INFO, seq=-1, ok=False, error=error.to_wire()), b""

    def owner(self, request: Request) -> str:
        """Who asks. Raises HttpError 401."""
        return owner_of(request, self.settings.api_keys)

    async def session(self, request: Request, session: str) -> SessionRecord:
        """A session of the caller's. Raises InvalidInput when it is over, never was, or is another tenant's."""
        owner = self.owner(request)
        record = await self.store.session(session)
        over = record is None or await self.store.last_seen(session) is None
        if record is None or over or record.owner != owner:
            raise InvalidInput(f"there is no session {session!r}", remedy="Create one; it may be over.")
        return record

    async def model(self, request: Request, model: str) -> ModelRecord:
        """A training run of the caller's. Raises UnknownModel."""
        owner = self.owner(request)
        record = await self.store.model(model)
        if record is None or record.owner != owner:
            raise UnknownModel("there is no such model", remedy="Create it first.", model=model)
        return record

    async def readable(self, request: Request, path: TinkerPath) -> ModelRecord:
        """The training run of a checkpoint or version that is the caller's own or public; it may not be written yet.

        Raises UnknownVersion.
        """
        owner = self.owner(request)
        run = await self.store.model(path.model)
        if run is not None and run.owner != owner:
            # Public is what was published, not what took its name since.
            records = (await self.store.saves(path.model)).get(path.checkpoint_id, ())
            found = await asyncio.to_thread(look, self.settings, path, records)
            if found is None or found.record is None or not found.record.public:
                run = None
        if run is None:
            raise UnknownVersion(f"there is no {path}", remedy="Use a path that a save returned.", field="path")
        return run

    async def check_owner(self, request: Request, name: str) -> None:
        """Whether a model, sampling session or request is of a session of the caller's. Raises UnknownModel."""
        owner = self.owner(request)
        if await self.owner_of(name) not in (None, owner):
            raise UnknownModel("there is no such model or request", remedy="Use the key that made it.", model=name)

    async def owner_of(self, name: str) -> str | None:
        """Whose a model, sampling session or request is; None for what was made at another gateway."""
        if (owner := owner_in(name)) is not None:
            return owner
        if (session := await self.store.session(session_of(name))) is not None:
            return session.owner
        parts = name.split(":")
        for count in range(len(parts), 0, -1):
            if (model := await self.store.model(":".join(parts[:count]))) is not None:
                return model.owner
        return None

    async def status(self) -> dict[str, Any] | None:
        """What the service last said of itself; None when it is silent."""
        return await get_status(self.bus)

    async def context(self) -> int:
        """Tokens that the base model can hold. Raises TinsmithError while the service has not said so."""
        if self._context is None:
            status = await self.status()
            if status is None:
                raise TinsmithError("the service is not up", remedy="Try again in a moment.")
            self._context = int(status["trainer"]["context"])
        return self._context

"""Submitter: puts commands onto the bus. A submit may be repeated blindly with the same command id."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tinsmith.bus.protocol.envelope import LANES, Command, Event
from tinsmith.bus.protocol.errors import (
    BusError,
    Busy,
    CommandConflict,
    InvalidInput,
    ModelExists,
    SeqConflict,
    UnknownModel,
)
from tinsmith.bus.protocol.headers import digest, pack_command, unpack_event
from tinsmith.bus.redis.blobs import INLINE_BYTES, delete_blob, put_blob
from tinsmith.bus.redis.session import Session

BACKLOG_CAP = 10_000
"""Commands of one model that may wait."""


@dataclass(frozen=True)
class Submitted:
    """Where a command stands: its seq, its state (parked, queued or done) and, when done, its event."""

    seq: int
    state: str
    event: Event | None = None
    duplicate: bool = False
    """This id was submitted before with the same content."""


class Submitter:
    """Submits commands."""

    def __init__(self, session: Session, backlog_cap: int = BACKLOG_CAP) -> None:
        self._session = session
        self._cap = backlog_cap

    async def submit(
        self, command: Command, body: bytes = b"", *, reply_to: str | None = None, deadline: float | None = None
    ) -> Submitted:
        """Accept a command: once this returns, it takes effect exactly once, in the order of seq.

        reply_to names the Inbox that gets the result; deadline is in seconds. Raises Busy (backlog full or server out
        of memory: try again with the same id), CommandConflict, SeqConflict, UnknownModel, ModelExists, InvalidInput,
        BusUnreachable (unknown whether it was accepted: repeat it), BusLost.
        """
        keys = self._session.keys
        check_reader(reply_to)
        header = pack_command(command)
        blob = await put_blob(self._session, body) if len(body) > INLINE_BYTES else ""
        try:
            reply = await self._session.script(
                "submit",
                [
                    keys.meta(command.model),
                    keys.commands(command.model),
                    keys.parked(command.model),
                    keys.events(command.model),
                    keys.record(command.id),
                    keys.models,
                    keys.bell,
                    keys.blob(blob) if blob else keys.incarnation,
                    keys.inbox(reply_to) if reply_to else keys.incarnation,
                ],
                command.model,
                command.id,
                command.seq,
                command.kind.value,
                digest(command, body),
                header,
                b"" if blob else body,
                blob,
                len(body),
                reply_to or "",
                self._cap,
                int(command.model in LANES),
                keys.record_prefix,
                deadline=deadline,
            )
        except Busy as error:
            raise error.at(model=command.model, command=command.id) from None
        if blob and reply[0] != "OK":
            await delete_blob(self._session, blob)
        if reply[0] == "OK":
            return Submitted(seq=reply[2], state=reply[1].decode())
        if reply[0] == "DUP":
            state = reply[1].decode()
            event = unpack_event(reply[4], reply[3], reply[2]) if state == "done" else None
            return Submitted(seq=reply[2], state=state, event=event, duplicate=True)
        raise _refusal(reply, command, self._cap)


_READER = re.compile(r"^[A-Za-z0-9._-]{1,64}$")


def check_reader(name: str | None) -> str | None:
    """The name of an inbox, or None. Raises InvalidInput when it can't be one."""
    if name is not None and not _READER.fullmatch(name):
        raise InvalidInput(
            f"{name!r} is not an inbox name", remedy="Use letters, digits and . _ - (64 at most).", field="reply_to"
        )
    return name


def _refusal(reply: list[Any], command: Command, cap: int) -> Exception:
    places: dict[str, Any] = {"model": command.model, "command": command.id}
    match reply[0]:
        case "CONFLICT":
            return CommandConflict(
                "this command id was submitted before with another content", remedy="Use a fresh id.", **places
            )
        case "SEQ" if reply[1] == -1:
            return SeqConflict("the sampling lane has no order", remedy="Submit with seq -1.", field="seq", **places)
        case "SEQ":
            return SeqConflict(
                f"seq {command.seq} is taken by another command; the next free one is {reply[1]}",
                remedy="Number the model's commands in order from one place, or use seq -1.",
                field="seq",
                **places,
            )
        case "BUSY":
            return Busy(f"{reply[1]} commands wait already (the limit is {cap})", remedy="Try again later.", **places)
        case "CLOSING":
            return Busy("the model of this name is being unloaded", remedy="Try again in a moment.", **places)
        case "UNKNOWN":
            return UnknownModel("no model of that name is held here", remedy="Create it first.", **places)
        case "EXISTS":
            return ModelExists("a model of that name exists", remedy="Unload it, or take another name.", **places)
        case "BLOB":
            return BusError("the body's blob is gone", remedy="Submit again with the same id.", **places)
    return BusError(f"submit gave the unknown reply {reply[0]!r}", **places)

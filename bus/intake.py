"""The door: commands that foreign programs wrote to one stream with a plain XADD are admitted from here.

Invariant: an entry leaves the door only after its command was accepted, or its refusal was told; admitting twice is
harmless, because the command id makes it so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinsmith.bus.protocol.envelope import Command, Event
from tinsmith.bus.protocol.errors import BusLost, BusUnreachable, TinsmithError
from tinsmith.bus.protocol.headers import pack_event, unpack_command
from tinsmith.bus.redis.session import Session
from tinsmith.bus.submit import Submitter, check_reader

REPLY_SECONDS = 3600


async def admit(session: Session, producer: Submitter, entries: Sequence[Any]) -> list[str]:
    """Submit the commands of these entries and take them from the door; returns the models they are for.

    A command that is not accepted (Busy included) is answered to its `reply_to` with an event, and recorded with the
    dead. Raises BusUnreachable and BusLost, the entries then stay.
    """
    models = []
    for entry, fields in entries:
        values = dict(zip(fields[::2], fields[1::2], strict=True))
        command, reply_to = None, None
        try:
            reply_to = check_reader(values.get(b"reply_to", b"").decode(errors="replace") or None)
            command = unpack_command(values.get(b"header", b""))
            await producer.submit(command, values.get(b"body", b""), reply_to=reply_to)
            models.append(command.model)
        except (BusLost, BusUnreachable):
            raise
        except TinsmithError as error:
            await _refuse(session, entry, command, reply_to, error)
        await session.call(("XDEL", session.keys.door, entry))
    return models


async def _refuse(
    session: Session, entry: bytes, command: Command | None, reply_to: str | None, error: TinsmithError
) -> None:
    keys = session.keys
    if command is None:
        reason: tuple[str | bytes, ...] = ("door", entry, "reason", str(error))
    else:
        event = Event(
            id=command.id, model=command.model, kind=command.kind, seq=command.seq, ok=False, error=error.to_wire()
        )
        header = pack_event(event)
        reason = ("door", entry, "model", command.model, "id", command.id, "seq", str(command.seq), "event", header)
        if reply_to is not None:
            inbox = keys.inbox(reply_to)
            fields = ("id", command.id, "n", 0, "seq", command.seq, "header", header, "size", 0, "body", b"")
            await session.call(("XADD", inbox, "*", *fields), ("EXPIRE", inbox, REPLY_SECONDS))
    await session.call(("XADD", keys.dead, "MAXLEN", "~", 1000, "*", *reason))

"""Command and Event as the msgpack maps that travel, and the digest that tells a retry from a conflict."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgpack
from pydantic import ValidationError

from tinsmith.bus.protocol.envelope import Command, Event
from tinsmith.bus.protocol.errors import InvalidInput, ProtocolError


def pack_command(command: Command) -> bytes:
    """The command's header. Raises InvalidInput when an argument can't be carried."""
    return _pack(command.model_dump(), command)


def unpack_command(header: bytes, seq: int | None = None) -> Command:
    """The command of a header; `seq`, where the bus has given one, replaces the header's. Raises ProtocolError."""
    fields = _unpack(header)
    try:
        return Command.model_validate(fields if seq is None else {**fields, "seq": seq})
    except ValidationError as error:
        raise ProtocolError(f"not a command header: {_first(error)}") from None


def pack_event(event: Event) -> bytes:
    """The event's header; its number and seq travel beside it, because the bus gives them."""
    return _pack(event.model_dump(), event)


def unpack_event(header: bytes, n: int, seq: int) -> Event:
    """The event of a header with the number and seq that the bus gave. Raises ProtocolError."""
    try:
        return Event.model_validate({**_unpack(header), "n": n, "seq": seq})
    except ValidationError as error:
        raise ProtocolError(f"not an event header: {_first(error)}") from None


def digest(command: Command, body: bytes) -> bytes:
    """16 bytes that are equal for the same content, whenever it was submitted."""
    content = [command.model, command.kind.value, command.seq, command.args, list(command.lengths)]
    summed = hashlib.blake2b(json.dumps(content, sort_keys=True, default=repr).encode(), digest_size=16)
    summed.update(body)
    return summed.digest()


def _pack(fields: dict[str, Any], header: Command | Event) -> bytes:
    try:
        packed: bytes = msgpack.packb(fields, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(
            f"the header can't be carried: {error}",
            remedy="Use strings, numbers, lists and maps; arrays belong in the body.",
            model=header.model,
            command=header.id,
        ) from None
    return packed


def _unpack(header: bytes) -> dict[str, Any]:
    try:
        fields = msgpack.unpackb(header, raw=False, strict_map_key=True)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a header is not msgpack: {error}") from None
    if not isinstance(fields, dict):
        raise ProtocolError("a header is not a map")
    return fields


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"

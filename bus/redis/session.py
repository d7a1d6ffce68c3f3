"""Session: one process on one bus. Calls with one deadline, retried until then; errors mapped to the one tree.

Every script is safe to repeat, so a call whose connection failed is repeated until its deadline. Each new connection
first compares the incarnation id with the one read at the start: a server that came back without its data, or was
flushed, raises BusLost for ever after.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from redis.exceptions import AuthenticationError, NoScriptError, RedisError, ResponseError

from tinsmith.bus.protocol.errors import BusError, BusLost, BusUnreachable, Busy, Fenced, ProtocolError, StartupError
from tinsmith.bus.redis.keys import Keys
from tinsmith.bus.redis.scripts import SCRIPTS
from tinsmith.bus.redis.wire import Wire, Word

PROTOCOL = b"1"
STALLED_SECONDS = 2.0
"""A request unanswered for so long is tried on a new connection: the old one may be half-open."""
SLACK_SECONDS = 2.0
"""How much longer than its BLOCK a blocking read may take."""


class Session:
    """The wires, keys and incarnation that the parts of a Bus share."""

    def __init__(self, url: str, bus: str, deadline: float) -> None:
        self.url = url
        self.keys = Keys(bus)
        self.deadline = deadline
        self.incarnation = b""
        self.lost: BusLost | None = None
        self._wires: list[Wire] = []
        self.wire = self.new_wire()

    def new_wire(self) -> Wire:
        """Another connection with the same checks, for reads that block; closed with the session."""
        try:
            wire = Wire(self.url, self._greet)
        except ValueError as error:
            raise StartupError(
                f"{self.url!r} is not a bus address: {error}", remedy="Use redis://host:port/db or unix:///path."
            ) from None
        self._wires.append(wire)
        return wire

    async def close_wire(self, wire: Wire) -> None:
        """Close a wire that `new_wire` made."""
        if wire in self._wires:
            self._wires.remove(wire)
        await wire.close()

    async def close(self) -> None:
        """Close every connection."""
        while self._wires:
            await self._wires.pop().close()

    async def begin(self) -> None:
        """Read (or, on an empty server, write) the incarnation and the protocol version.

        Raises BusUnreachable, or ProtocolError when the bus speaks another version.
        """
        keys = self.keys
        replies = await self.call(
            ("SET", keys.incarnation, uuid.uuid4().hex, "NX"),
            ("GET", keys.incarnation),
            ("SET", keys.version, PROTOCOL, "NX"),
            ("GET", keys.version),
        )
        if replies[3] != PROTOCOL:
            raise ProtocolError(
                f"bus {keys.bus!r} speaks protocol {replies[3]!r}, this program {PROTOCOL!r}",
                remedy="Use the same release on both sides, or another bus name.",
            )
        self.incarnation = replies[1]

    async def call(
        self,
        *commands: Sequence[Word],
        deadline: float | None = None,
        errors: bool = False,
        wire: Wire | None = None,
    ) -> list[Any]:
        """The replies to a batch of commands that is safe to repeat. `deadline` is in seconds from now.

        Raises BusUnreachable at the deadline, BusLost, and for an error reply its typed error (unless `errors`: then
        it stands in the list).
        """
        seconds = self.deadline if deadline is None else deadline
        wire = wire or self.wire
        pause, patience, cause = 0.01, STALLED_SECONDS, ""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    if self.lost is not None:
                        raise self.lost
                    try:
                        async with asyncio.timeout(patience):
                            replies = await wire.send(commands)
                        break
                    except TimeoutError:
                        # Half-open, or only slow: try a new connection, and give that one more time.
                        wire.break_off(older_than=patience - 0.5)
                        patience *= 2
                        cause = " (connected, but the server is silent)"
                    except AuthenticationError as error:
                        raise BusUnreachable(
                            f"{self.url} refused the login: {error}", remedy="Check user and password in the address."
                        ) from None
                    except (RedisError, OSError) as error:
                        cause = f" (last: {error})"
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, 0.25)
        except TimeoutError:
            raise BusUnreachable(
                f"no answer from {_without_password(self.url)} within {seconds:g} s{cause}",
                remedy="Check that the server runs and that the address is right; repeat with the same command id.",
            ) from None
        if not errors:
            for reply in replies:
                if isinstance(reply, ResponseError):
                    raise typed(reply)
        return replies

    async def script(self, name: str, keys: Sequence[str], *args: Word, deadline: float | None = None) -> list[Any]:
        """Run one script and return its reply, first item a status as str.

        Raises BusLost, ProtocolError for a key of the wrong type, Fenced, Busy when the server's memory is full.
        """
        reply: list[Any] | BusError
        (reply,) = await self.scripts([(name, keys, args)], deadline=deadline)
        if isinstance(reply, BusError):
            raise reply
        return reply

    async def scripts(
        self,
        runs: Sequence[tuple[str, Sequence[str], Sequence[Word]]],
        deadline: float | None = None,
        wire: Wire | None = None,
    ) -> list[Any]:
        """Run many in one round trip; the reply of each, or its typed error (not raised, except BusLost)."""
        if not runs:
            return []
        commands: list[tuple[Word, ...]] = [
            (
                "EVALSHA",
                SCRIPTS[name].sha,
                len(keys) + 1,
                self.keys.incarnation,
                *keys,
                self.incarnation,
                *args,
            )
            for name, keys, args in runs
        ]
        replies = await self.call(*commands, deadline=deadline, errors=True, wire=wire)
        missing = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if missing:
            loads = [("SCRIPT", "LOAD", SCRIPTS[name].text) for name in {runs[at][0] for at in missing}]
            batch = [*loads, *(commands[at] for at in missing)]
            again = await self.call(*batch, deadline=deadline, errors=True, wire=wire)
            for at, reply in zip(missing, again[len(loads) :], strict=True):
                replies[at] = reply
        return [self._judged(reply) for reply in replies]

    def _judged(self, reply: Any) -> Any:
        if isinstance(reply, ResponseError):
            return typed(reply)
        status = reply[0] = reply[0].decode()
        if status == "LOST":
            raise self.declare_lost()
        if status == "TYPE":
            key, wanted, got = (part.decode() for part in reply[1:])
            return ProtocolError(
                f"key {key!r} holds a {got}, the bus needs a {wanted}; nothing was written",
                remedy="Delete the key, or use another bus name or database.",
            )
        if status == "FENCED":
            return Fenced(
                f"the model's epoch is {reply[1].decode()} (owner {reply[2].decode() or 'none'!r})",
                remedy="Stop working on it: another owner has taken over.",
            )
        return reply

    async def check_life(self) -> None:
        """Raises BusLost when the server no longer holds the data that it had at the start."""
        (found,) = await self.call(("GET", self.keys.incarnation))
        if found != self.incarnation:
            raise self.declare_lost()

    def declare_lost(self) -> BusLost:
        """Remember, and return, that the data is gone: no later call may write into another life."""
        if self.lost is None:
            self.lost = BusLost(
                f"bus {self.keys.bus!r} lost its data (flushed, or the server came back empty)",
                remedy="What was in flight is unknown. Open the bus anew and restore models from their snapshots.",
            )
        return self.lost

    async def block(self, wire: Wire, block_ms: int, *command: Word) -> Any:
        """The reply to one blocking read on its own wire, or None when nothing came within `block_ms`.

        A dropped connection is made again within the same time. Raises BusUnreachable when the server does not answer
        by `block_ms` + 2 s (which is how a half-open connection shows), BusLost.
        """
        pause, cause = 0.01, "it did not answer"
        try:
            async with asyncio.timeout(block_ms / 1000 + SLACK_SECONDS):
                while True:
                    if self.lost is not None:
                        raise self.lost
                    try:
                        (reply,) = await wire.send([command])
                        break
                    except (RedisError, OSError) as error:
                        cause = str(error)
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, 0.25)
        except TimeoutError:
            wire.break_off()
            raise BusUnreachable(
                f"a blocking read on {_without_password(self.url)} failed: {cause}",
                remedy="Check that the server runs; reading again is safe.",
            ) from None
        if isinstance(reply, ResponseError):
            raise typed(reply)
        return reply

    async def _greet(self, connection: Any) -> None:
        if self.incarnation:
            await connection.send_command("GET", self.keys.incarnation, check_health=False)
            if await connection.read_response() != self.incarnation:
                raise self.declare_lost()


def typed(error: ResponseError) -> BusError:
    """The error of the one tree for an error reply of the server."""
    text = str(error)
    if "OOM command not allowed" in text or "command not allowed when used memory" in text:
        return Busy(
            "the bus server is out of memory",
            remedy="Try again with the same command id when work has been done, or raise maxmemory.",
        )
    if "MISCONF" in text:
        return BusError(
            f"the bus server can't write to its disk: {text}", remedy="Free space on its disk; it recovers by itself."
        )
    if "WRONGTYPE" in text:
        return ProtocolError(f"a key holds the wrong type: {text}", remedy="Use another bus name or database.")
    return BusError(f"the bus server refused: {text}")


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"

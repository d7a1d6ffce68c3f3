"""What lies on a bus: every key with its type, size, memory and time to live, and what it is for.

Found by SCAN, which never holds up the server; a key that comes or goes meanwhile may be in the list or not.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from redis.exceptions import ResponseError

from tinsmith.bus.bus import Bus
from tinsmith.bus.redis.keys import Keys

SCAN_COUNT = 500
"""Keys that one SCAN looks at, and then asks about in one round trip."""
UNKNOWN = "not of this release"

_LENGTH = {"string": "STRLEN", "list": "LLEN", "set": "SCARD", "zset": "ZCARD", "hash": "HLEN", "stream": "XLEN"}
_ONE = ("incarnation", "version", "epoch", "models", "bell", "event_bell", "door", "dead", "status")
_MANY = {
    "record": "<command>",
    "blob": "<blob>",
    "inbox": "<client>",
    "commands": "<model>",
    "meta": "<model>",
    "parked": "<model>",
    "events": "<model>",
}
"""Names in Keys of families of keys -> what tells their members apart."""


@dataclass(frozen=True)
class Held:
    """One key."""

    key: str
    """Without the bus's prefix."""
    kind: str
    """The family it is of: `c:<command>`; the key itself where there is one only or it is unknown."""
    what: str
    model: str | None
    """Whose it is; None: the bus's own."""
    type: str
    length: int
    """Characters of a string, members, fields or entries of the rest."""
    size: int | None
    """Memory, bytes, estimated by the server; None where it does not tell."""
    seconds: float | None
    """Time to live; None: for ever."""


def describe(extra: Mapping[str, str] = {}) -> dict[str, str]:
    """Family -> what it is: those of bus/redis/keys.py in their own words, and `extra` ones of other layers. Pure."""
    keys = Keys("b")
    names = {name: getattr(keys, name) for name in _ONE}
    names.update({name: getattr(keys, name)(member) for name, member in _MANY.items()})
    said = {full.removeprefix(keys.prefix): _summary(name) for name, full in names.items()}
    return {**said, **extra}


def classify(key: str, families: Mapping[str, str]) -> tuple[str, str, str | None]:
    """(family, what it is, model) of a key without its prefix. Pure."""
    best: tuple[str, str | None] | None = None
    for family in families:
        found = re.fullmatch(re.sub("<[a-z]+>", "(.+)", re.escape(family)), key)
        # Of two that fit, the longer one says more.
        if found and (best is None or len(family) > len(best[0])):
            best = family, found[1] if "<model>" in family else None
    if best is None:
        return key, UNKNOWN, None
    return best[0], families[best[0]], best[1]


async def take_inventory(bus: Bus, extra: Mapping[str, str] = {}) -> list[Held]:
    """Every key of this bus, by model and name. Raises BusUnreachable, BusLost."""
    families = describe(extra)
    call, keys = bus.session.call, bus.session.keys
    found: dict[str, Held] = {}
    cursor: Any = b"0"
    while True:
        ((cursor, batch),) = await call(("SCAN", cursor, "MATCH", keys.pattern, "COUNT", SCAN_COUNT))
        names = [name for name in batch if name.decode() not in found]
        types = await call(*(("TYPE", name) for name in names)) if names else []
        known = [(name, kind.decode()) for name, kind in zip(names, types, strict=True) if kind.decode() in _LENGTH]
        asked = [c for name, kind in known for c in ((_LENGTH[kind], name), ("MEMORY", "USAGE", name), ("PTTL", name))]
        # A key that changed its type since, and servers that forbid MEMORY, answer with an error.
        told = await call(*asked, errors=True) if asked else []
        for at, (name, kind) in enumerate(known):
            length, size, ttl = told[3 * at : 3 * at + 3]
            if isinstance(length, ResponseError) or ttl == -2:
                continue
            key = name.decode()
            family, what, model = classify(key.removeprefix(keys.prefix), families)
            found[key] = Held(
                key=key.removeprefix(keys.prefix),
                kind=family,
                what=what,
                model=model,
                type=kind,
                length=length,
                size=None if isinstance(size, ResponseError) else size,
                seconds=None if ttl < 0 else ttl / 1000,
            )
        if cursor in (b"0", 0):
            return sorted(found.values(), key=lambda held: (held.model or "", held.kind, held.key))


def as_text(inventory: Sequence[Held], most: int | None = None) -> str:
    """A table for people, one group a model, the bus's own first. Of a family with more than `most` keys in a group
    there is one line, with their sums. Pure."""
    lines = []
    for model, group in groupby(inventory, key=lambda held: held.model):
        members = list(group)
        lines.append(f"{'the bus' if model is None else f'model {model}'}: {_many(members)}")
        lines.extend(_rows(members, most))
    lines.append(f"all: {_many(inventory)}")
    return "\n".join(lines)


def _rows(members: Iterable[Held], most: int | None) -> Iterator[str]:
    for kind, group in groupby(members, key=lambda held: held.kind):
        family = list(group)
        if most is not None and len(family) > most:
            lives = [held.seconds for held in family if held.seconds is not None]
            ttl = f"up to {max(lives):.0f} s" if lives else "for ever"
            length = sum(held.length for held in family)
            yield _row(f"{kind} ({len(family)} keys)", family[0].type, length, _size(family), ttl, family[0].what)
            continue
        for held in family:
            ttl = "for ever" if held.seconds is None else f"{held.seconds:.0f} s"
            yield _row(held.key, held.type, held.length, _size([held]), ttl, held.what)


def _row(key: str, kind: str, length: int, size: str, ttl: str, what: str) -> str:
    return f"  {key:40} {kind:6} {length:>8} {size:>11} {ttl:>12}  {what}"


def _many(members: Sequence[Held]) -> str:
    return f"{len(members)} keys, {_size(members)}"


def _size(members: Iterable[Held]) -> str:
    sizes = [held.size for held in members]
    told = [size for size in sizes if size is not None]
    return f"{sum(told)} B" if len(told) == len(sizes) else "? B"


def _summary(name: str) -> str:
    said = inspect.getdoc(getattr(Keys, name)) or ""
    return " ".join(said.split()).removesuffix(".")

"""The inventory names every key of a bus, what it is for, and no key of another bus."""

from __future__ import annotations

from typing import Any

from tinsmith.bus.bus import Bus
from tinsmith.bus.inventory import UNKNOWN, as_text, classify, describe, take_inventory
from tinsmith.bus.redis.keys import Keys


def test_every_name_in_keys_is_described() -> None:
    keys = Keys("b")
    families = describe()
    named = {name for name in vars(Keys) if not name.startswith("_")} - {"bus", "prefix", "pattern"}
    for name in named - {"record_prefix", "blob_prefix"}:
        made = getattr(keys, name)
        key = (made("some:name") if callable(made) else made).removeprefix(keys.prefix)
        family, what, model = classify(key, families)
        assert what != UNKNOWN, name
        assert what.split(",")[0].split(":")[0] in ("string", "set", "stream", "hash"), what
        assert (model == "some:name") == family.startswith("m:")


def test_a_key_is_of_the_family_that_says_most() -> None:
    families = describe({"http:models": "zset: all", "http:models:<session>": "set: of one", "http:x:<model>": "hash"})
    assert classify("http:models", families) == ("http:models", "zset: all", None)
    assert classify("http:models:s-1", families) == ("http:models:<session>", "set: of one", None)
    assert classify("http:x:s-1:train:0", families) == ("http:x:<model>", "hash", "s-1:train:0")
    assert classify("m:a:b:cmd", families)[2] == "a:b"
    assert classify("else", families) == ("else", UNKNOWN, None)


async def test_the_inventory_of_a_bus_is_whole_and_its_own(bus: Bus, coordinator: Bus, url: str, h: Any) -> None:
    from tinsmith.bus.connection import open_bus

    epoch = await h.create(coordinator, "m")
    await bus.submit(h.command("m", seq=1), b"x" * 300_000)
    await bus.session.call(("SET", bus.session.keys.prefix + "stray", "12345", "PX", "60000"))
    for number in range(1200):
        await bus.session.call(("SET", bus.session.keys.record(f"r{number}"), "1"))
    async with await open_bus(url, bus.session.keys.bus + "-other") as other:
        await h.create(other, "n")
        found = {held.key: held for held in await take_inventory(bus)}
    assert len([key for key in found if key.startswith("c:r")]) == 1200
    assert {held.model for held in found.values()} == {None, "m"}
    commands = found["m:m:cmd"]
    assert (commands.type, commands.length, commands.seconds) == ("stream", 2, None)
    assert commands.what == "stream: the model's commands"
    (blob,) = [held for held in found.values() if held.kind == "b:<blob>"]
    assert blob.size is not None
    assert blob.size > 300_000
    stray = found["stray"]
    assert (stray.type, stray.length, stray.what) == ("string", 5, UNKNOWN)
    assert stray.seconds is not None
    assert 0 < stray.seconds <= 60
    scanned = await bus.session.call(("EXISTS", *(bus.session.keys.prefix + key for key in found)))
    assert scanned == [len(found)]

    text = as_text(list(found.values()), most=8)
    assert "c:<command> (1202 keys)" in text
    assert "model m: 3 keys" in text
    assert as_text(list(found.values())).count("c:r") == 1200
    assert epoch

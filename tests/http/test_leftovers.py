"""What nothing holds goes, what anything holds stays, and no write or sample under way is ever harmed."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tinsmith.actors.engine.checkpoint import write_directory
from tinsmith.api.http.gateway import Gateway
from tinsmith.api.http.retention import sweeper
from tinsmith.api.http.retention.catalog import remove
from tinsmith.api.http.retention.leftovers import (
    ANCIENT_SECONDS,
    GUARD_SECONDS,
    LIFE_FILE,
    Holders,
    Leftover,
    collect,
    is_due,
)
from tinsmith.api.http.settings import HttpSettings
from tinsmith.api.http.tenancy import store
from tinsmith.api.http.tenancy.names import TinkerPath
from tinsmith.api.http.tenancy.records import ModelRecord, SamplerRecord, SaveRecord, SessionRecord
from tinsmith.bus.protocol.commands import LoraSpec
from tinsmith.bus.protocol.envelope import Command, Kind, new_id
from tinsmith.bus.redis.embedded import EmbeddedServer

LIVING, OVER = "s-00000000000000aa", "s-00000000000000bb"
HOUR = GUARD_SECONDS + 60


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedServer()
    yield server.start(tmp_path_factory.mktemp("bus"))
    server.stop()


@pytest.fixture
async def door(url: str, tmp_path: Path) -> AsyncIterator[Gateway]:
    """A door over a bus and a state folder of its own, where one session lives and no service runs."""
    settings = HttpSettings(bus_url=url, bus=f"t-{new_id()}", alias="tiny", model_path="-", state_dir=str(tmp_path))
    opened = await Gateway.open(settings)
    await opened.store.put_session(LIVING, SessionRecord(owner="me", created=time.time()))
    yield opened
    await opened.close()


def make(door: Gateway, *places: str) -> None:
    for place in places:
        write_directory(Path(door.settings.state_dir) / place, lambda fresh: (fresh / "file").write_text("x") and None)


def there(door: Gateway, name: str = "file") -> set[str]:
    state = Path(door.settings.state_dir)
    return {str(file.parent.relative_to(state)) for file in state.rglob(name)}


async def create(door: Gateway, model: str, snapshot: int) -> None:
    await door.bus.submit(Command(id=new_id(), model=model, kind=Kind.CREATE_MODEL, seq=0))
    await door.bus.session.call(("HSET", door.bus.session.keys.meta(model), "snapshot", snapshot))


async def test_versions_go_with_what_held_them_and_named_ones_stay(door: Gateway) -> None:
    stay = {
        f"published/{LIVING}:train:0/@3",
        f"published/{OVER}:train:0/@4",
        f"published/{OVER}:train:0/kept",
        f"published/{OVER}:train:0/external.kept",
        f"published/{OVER}:train:2/@9",
        f"checkpoints/{OVER}:train:0/kept",
        f"checkpoints/{OVER}:train:0/@7",
        "published/mine/@mine",
    }
    go = {f"published/{OVER}:train:0/@5", f"published/{OVER}:train:1/@5"}
    await collect(door, time.time())
    make(door, *stay, *go)
    over_it = SamplerRecord(owner="me", base="tiny", version=f"{OVER}:train:0/@4")
    await door.store.put_sampler(f"{LIVING}:sample:0", over_it)
    await create(door, f"{OVER}:train:2", -1)
    assert await collect(door, time.time()) == []
    removed = await collect(door, time.time() + HOUR)
    assert {str(path.relative_to(door.settings.state_dir)) for path in removed} == go
    assert there(door) == stay
    await collect(door, time.time() + 2 * HOUR)
    assert not (Path(door.settings.state_dir) / f"published/{OVER}:train:1").exists()


async def test_snapshots_go_when_they_are_superseded_or_their_model_is_gone(door: Gateway) -> None:
    await create(door, "live", 9)
    await collect(door, time.time())
    stay = {"snapshots/live/9", "snapshots/live/12"}
    make(door, *stay, "snapshots/live/3", "snapshots/live/8", "snapshots/gone/5")
    await collect(door, time.time() + HOUR)
    assert there(door) == stay


async def test_what_a_crash_left_half_done_goes_and_a_checkpoint_between_two_names_comes_back(door: Gateway) -> None:
    state = Path(door.settings.state_dir)
    make(door, "checkpoints/m/a", "checkpoints/m/b", "published/m/v", "snapshots/m/3")
    await create(door, "m", 3)
    (state / "checkpoints/m/a").rename(state / "checkpoints/m/.a.replaced")
    for left in ("checkpoints/m/.b.writing", "checkpoints/m/.b.replaced", "published/m/.v.deleted", "snapshots/m/.4"):
        (state / left).mkdir()
        (state / left / "half").write_text("x")
    assert await collect(door, time.time()) == []
    await collect(door, time.time() + 90)
    assert (state / "checkpoints/m/a/file").is_file()
    assert (state / "checkpoints/m/.b.writing/half").is_file()
    await collect(door, time.time() + HOUR)
    assert there(door, "half") == set()
    assert there(door) == {"checkpoints/m/a", "checkpoints/m/b", "published/m/v", "snapshots/m/3"}


DIES = """
import sys
from pathlib import Path
from tinsmith.actors.engine.checkpoint import write_directory

def fill(fresh):
    (fresh / "half").write_text("x")
    print("half", flush=True)
    sys.stdin.read()

write_directory(Path(sys.argv[1]), fill)
"""


async def test_a_writer_that_is_killed_leaves_nothing_for_long(door: Gateway) -> None:
    make(door, "checkpoints/m/a")
    place = Path(door.settings.state_dir) / "checkpoints" / "m" / "a"
    pipe = asyncio.subprocess.PIPE
    writer = await asyncio.create_subprocess_exec(sys.executable, "-c", DIES, str(place), stdin=pipe, stdout=pipe)
    assert writer.stdout is not None
    assert await writer.stdout.readline() == b"half\n"
    await collect(door, time.time())
    assert there(door, "half") == {"checkpoints/m/.a.writing"}
    writer.kill()
    await writer.wait()
    await collect(door, time.time() + HOUR)
    assert there(door, "half") == set()
    assert there(door) == {"checkpoints/m/a"}


async def test_a_bus_judges_nothing_that_lay_there_before_it(door: Gateway) -> None:
    state = Path(door.settings.state_dir)
    make(door, "snapshots/theirs/5", f"published/{OVER}:train:0/@5")
    (state / LIFE_FILE).write_text(json.dumps({"incarnation": "another", "since": 0.0}))
    for later in (0, HOUR, ANCIENT_SECONDS - HOUR):
        assert await collect(door, time.time() + later) == []
    told = json.loads((state / LIFE_FILE).read_text())
    assert told["incarnation"] == door.bus.incarnation
    await collect(door, time.time() + ANCIENT_SECONDS + HOUR)
    assert there(door) == {"snapshots/theirs/5"}


def test_nothing_young_and_nothing_held_is_due() -> None:
    model = f"{OVER}:train:0"

    def due(kind: str, name: str, age: float, meta: dict[str, str] | None = None, **held: object) -> bool:
        one = Leftover(Path("/s") / model / name, kind, model, 1e9 - age)  # type: ignore[arg-type]
        fields = {"models": {model: meta or {}}, "sessions": frozenset(), "sampled": frozenset(), "since": 0.0, **held}
        return is_due(one, Holders(**fields), 1e9)  # type: ignore[arg-type]

    live, freed = {"state": "live", "snapshot": "4"}, {"state": "freed", "snapshot": "4"}
    for kind, name in (("temporary", ".x.writing"), ("unnamed", "@1"), ("snapshot", "3"), ("empty", "m")):
        assert due(kind, name, HOUR)
        assert not due(kind, name, GUARD_SECONDS - 1)
    assert due("temporary", ".x.replaced", 61)
    assert due("snapshot", "4", HOUR, freed)
    assert due("snapshot", "4", HOUR, freed, since=2e9)
    assert due("snapshot", "3", HOUR, live)
    assert not due("snapshot", "4", HOUR, live)
    assert not due("snapshot", "3", 1e9, since=2e9)
    assert not due("empty", "m", HOUR, live)
    assert not due("unnamed", "@1", HOUR, live)
    assert not due("unnamed", "@1", HOUR, sessions=frozenset({OVER}))
    assert not due("unnamed", "@1", HOUR, sampled=frozenset({f"{model}/@1"}))
    assert not due("unnamed", "@1", HOUR, since=2e9)
    assert due("unnamed", "@1", ANCIENT_SECONDS, since=2e9)


async def test_a_time_to_live_ends_unnamed_versions_too_and_what_is_not_written_yet_keeps_it(door: Gateway) -> None:
    model, now = f"{LIVING}:train:0", time.time()
    await door.store.put_model(model, ModelRecord(owner="me", created=now, base="tiny", lora=LoraSpec(rank=4)))
    record = SaveRecord(seq=3, at=now, expires_at=now + 50)
    for place in ("sampler_weights/@3", "sampler_weights/named", "weights/late"):
        await door.store.put_saves(model, place, [record])
    await door.store.put_saves(model, "sampler_weights/kept", [SaveRecord(seq=4, at=now)])
    make(door, *(f"published/{model}/{name}" for name in ("@3", "named", "kept")))
    await sweeper.sweep(door, now + 40)
    assert len(there(door)) == 3
    await sweeper.sweep(door, now + 55)
    assert there(door) == {f"published/{model}/kept"}
    assert set(await door.store.saves(model)) == {"weights/late", "sampler_weights/kept"}
    make(door, f"checkpoints/{model}/late")
    await sweeper.sweep(door, now + 60)
    assert there(door) == {f"published/{model}/kept"}


async def test_a_disk_that_fails_puts_the_chores_off_and_ends_nothing(
    door: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (Path(door.settings.state_dir) / LIFE_FILE).mkdir()
    rounds = []

    async def sleep(seconds: float) -> None:
        rounds.append(seconds)
        raise asyncio.CancelledError

    monkeypatch.setattr(sweeper.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await sweeper.sweep_for_ever(door)
    assert rounds == [sweeper.SWEEP_SECONDS]
    assert "chores were put off" in caplog.text


async def test_of_many_who_delete_a_version_one_does(door: Gateway) -> None:
    path = TinkerPath("m", "sampler_weights", "v")
    for _ in range(20):
        make(door, "published/m/v")
        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(lambda _: remove(door.settings, path), range(4))) == 1
    assert list(door.settings.folder("sampler_weights", "m").iterdir()) == []


def test_the_store_describes_every_key_that_it_has() -> None:
    text = store.__doc__ or ""
    told = {re.sub("<.*", "", key) for key in re.findall(r"http:[a-z:]+", text)}
    used = {f"http:{word}" for word in re.findall(r'_key\("([a-z]+)"', Path(store.__file__).read_text())}
    listed = {re.sub("<.*", "", key) for key in store.KEYS}
    assert {key.rstrip(":") for key in listed} >= used
    assert listed == told

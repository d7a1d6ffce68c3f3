"""A disk without room: refused before anything is written, and nothing half-written is left when it fills up."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gloo_ranks import run_ranks
from tiny import batch
from torch.distributed.device_mesh import DeviceMesh

from tinsmith.actors.engine import checkpoint
from tinsmith.actors.engine.engine import Engine
from tinsmith.actors.service.disk import DiskReport, measure
from tinsmith.bus.protocol.commands import CreateModelArgs, ForwardArgs, LoraSpec, OptimStepArgs
from tinsmith.bus.protocol.errors import DiskFull

LORA = CreateModelArgs(base="tiny", lora=LoraSpec(rank=4))
FULL = CreateModelArgs(base="tiny")


def test_what_the_disk_has_no_room_for_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "c", {"a": torch.ones(2)}, {"n": 1})
    four_pebibytes = torch.zeros(1).expand(1 << 50)
    for name in ("c", "d"):
        with pytest.raises(DiskFull, match="Free space"):
            checkpoint.write(tmp_path / name, {"a": four_pebibytes}, {"n": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert checkpoint.read(tmp_path / "c")[1] == {"n": 1}


def save_without_room(mesh: DeviceMesh, base: Path, place: Path) -> tuple[list[str], float]:
    engine = Engine(base, alias="tiny", mesh=mesh, token_budget=48)
    engine.create("m", LORA)
    engine.create("f", FULL)
    refused = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.shutil, "disk_usage", lambda path: SimpleNamespace(free=1_050_000))
        for model in ("m", "f"):
            for write in (engine.save, engine.snapshot, engine.publish):
                with pytest.raises(DiskFull) as caught:
                    write(model, place / "x")
                refused.append(str(caught.value))
    data = batch(4)
    engine.forward("m", data, engine.plan(data), ForwardArgs(loss="cross_entropy"), backward=True)
    return refused, engine.optim_step("m", OptimStepArgs(lr=1e-2))["step"]


def test_a_refused_write_is_every_ranks_error_and_the_models_go_on(llama: Path, tmp_path: Path) -> None:
    first, second = run_ranks(2, save_without_room, llama, tmp_path / "s")
    assert first == second
    assert len(first[0]) == 6
    assert first[1] == 1
    assert list((tmp_path / "s").iterdir()) == []


FILLS_UP = """
import json, resource, sys
from pathlib import Path
import torch
from tinsmith.actors.engine import checkpoint
from tinsmith.actors.engine.engine import Engine
from tinsmith.bus.protocol.commands import CreateModelArgs, LoraSpec
from tinsmith.bus.protocol.errors import TinsmithError

base, place = Path(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)
engine = Engine(base, alias="tiny", token_budget=48)
engine.create("lora", CreateModelArgs(base="tiny", lora=LoraSpec(rank=4)))
engine.create("full", CreateModelArgs(base="tiny"))
engine.save("lora", place / "c", {"n": 1})
told = []
for limit in (200, 8_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for model in ("lora", "full"):
        for write in (engine.save, engine.publish):
            try:
                write(model, place / "c")
            except TinsmithError as error:
                told.append(error.to_wire())
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
engine.publish("lora", place / "v")
print(json.dumps(told))
"""


def test_a_disk_that_fills_up_meanwhile_leaves_what_was_there_and_nothing_else(llama: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FILLS_UP, str(llama), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.strip().rpartition("\n")[2])
    assert len(told) == 8
    assert {error["code"] for error in told} == {"disk_full"}
    assert all("could not be written: File too large" in error["message"] and error["remedy"] for error in told)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "v"]
    assert checkpoint.read(tmp_path / "c")[1]["user"] == {"n": 1}
    checkpoint.verify_directory(tmp_path / "v")


def test_an_earlier_checkpoint_stands_when_its_successor_cannot_get_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.write(tmp_path / "c", {"a": torch.ones(2)}, {"n": 1})
    rename = checkpoint.os.rename

    def fails(source: Path, target: Path) -> None:
        if source.name.endswith(".writing"):
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(checkpoint.os, "rename", fails)
    with pytest.raises(DiskFull, match="No space left"):
        checkpoint.write(tmp_path / "c", {"a": torch.zeros(2)}, {"n": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert checkpoint.read(tmp_path / "c")[1] == {"n": 1}


def test_the_report_tells_what_each_kind_takes(tmp_path: Path) -> None:
    for folder, size in {"checkpoints": 10, "published": 300, "snapshots": 7000}.items():
        place = tmp_path / folder / "m" / "x"
        place.mkdir(parents=True)
        (place / "file").write_bytes(b"x" * size)
        (place / "link").symlink_to(place / "file")
        (place / "copy").hardlink_to(place / "file")
    told = measure(tmp_path)
    free = told.pop("free_bytes")
    assert free > 0
    assert told == {"checkpoints_bytes": 10, "versions_bytes": 300, "snapshots_bytes": 7000}


def test_the_report_walks_the_disk_once_in_a_while_and_in_a_thread_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinsmith.actors.service import disk

    walks, may_end = [], threading.Event()

    def walk(state: Path) -> dict[str, int]:
        walks.append(threading.current_thread())
        assert may_end.wait(30)
        return measure(state)

    monkeypatch.setattr(disk, "measure", walk)
    report = DiskReport(tmp_path)
    assert report.latest() == {}
    assert report.latest() == {}
    assert report._walk is not None
    assert report._walk.is_alive()
    may_end.set()
    report._walk.join(30)
    assert report.latest()["free_bytes"] > 0
    assert len(walks) == 1
    report._due = 0.0
    report.latest()
    report._walk.join(30)
    assert len(walks) == 2
    assert threading.current_thread() not in walks

"""Starting and ending a service: what it needs, what it refuses, what it leaves behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from batches import supervised
from serving import Service, processes_of, run_cli, start_service

from tinsmith.api import connect
from tinsmith.bus.embedded import EmbeddedServer, find_server


def refused(*args: str, env: dict[str, str] | None = None) -> str:
    """What a service that can't start says; it must end by itself, with code 1 and nothing on stdout."""
    done = run_cli("serve", *args, env=env, timeout=120)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    return done.stderr


def test_a_path_that_is_not_a_model_is_refused(tmp_path: Path) -> None:
    said = refused("--model", str(tmp_path / "nothing"), "--state", str(tmp_path / "state"))
    assert "NotAModel" in said
    assert "Remedy" in said


def test_a_folder_that_is_not_a_model_is_refused_before_ray_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("no weights here")
    said = refused("--model", str(tmp_path / "folder"), "--state", str(tmp_path / "state"))
    assert "NotAModel" in said
    assert processes_of(tmp_path / "state") == []


def test_a_state_directory_in_use_is_refused_and_its_holder_named(tiny_model: Path, tmp_path: Path) -> None:
    server = EmbeddedServer()
    server.start(tmp_path / "state")
    try:
        said = refused("--model", str(tiny_model), "--state", str(tmp_path / "state"))
        assert "StateInUse" in said
        assert "held by process" in said
    finally:
        server.stop()


def test_a_wrong_metric_declaration_is_refused_and_named(tiny_model: Path, tmp_path: Path) -> None:
    overlay = tmp_path / "mine.toml"
    overlay.write_text('[mine]\nreduce = "median"\nsource = ["loss"]\nunit = "nats"\nhelp = "No such reduction."\n')
    said = refused("--model", str(tiny_model), "--state", str(tmp_path / "state"), "--metrics", str(overlay))
    assert "InvalidCatalogue" in said
    assert "mine" in said


def test_a_losses_module_that_does_not_exist_is_refused_and_named(tiny_model: Path, tmp_path: Path) -> None:
    said = refused("--model", str(tiny_model), "--state", str(tmp_path / "state"), "--losses", "no.such.module")
    assert "no.such.module" in said


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """A server of the machine's own (redis-server where it is installed), as a user runs one: by TCP."""
    binary = shutil.which("redis-server") or str(find_server())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path), "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "eady to accept connections" not in process.stdout.readline():
        assert process.poll() is None
    yield f"redis://127.0.0.1:{port}", command
    process.terminate()
    process.wait(10)


def test_a_server_that_may_drop_commands_is_refused_with_the_remedy(
    tiny_model: Path, tmp_path: Path, redis_server: tuple[str, list[str]]
) -> None:
    url, command = redis_server
    cli = command[0].replace("-server", "-cli")
    port = url.rpartition(":")[2]
    if shutil.which(cli) is None:
        with socket.create_connection(("127.0.0.1", int(port))) as raw:
            raw.sendall(b"CONFIG SET maxmemory-policy allkeys-lru\r\n")
            assert raw.recv(64).startswith(b"+OK")
    else:
        subprocess.run([cli, "-p", port, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru"], check=True)
    said = refused("--model", str(tiny_model), "--state", str(tmp_path / "state"), env={"REDIS_URL": url})
    assert "UnsafeServer" in said
    assert "allkeys-lru" in said
    assert "noeviction" in said


CLIENT = """
import asyncio, sys
import numpy as np
from tinsmith.api import Datum, connect

async def main(name):
    async with connect() as client:
        model = await client.create_model("tiny", name=name, lora_rank=4)
        rng = np.random.default_rng(len(name))
        data = [Datum(rng.integers(0, 160, 9), {"target_tokens": rng.integers(0, 160, 9)})]
        for _ in range(5):
            backward, step = model.forward_backward(data, "cross_entropy"), model.optim_step(lr=1e-2)
            print((await backward).metrics["loss:sum"], (await step).metrics["step"])

asyncio.run(main(sys.argv[1]))
"""


def test_two_programs_drive_two_models_over_redis_url_and_a_third_follows_from_the_beginning(
    tiny_model: Path, tmp_path: Path, redis_server: tuple[str, list[str]]
) -> None:
    url, _ = redis_server
    env = {"REDIS_URL": url}
    running = start_service(tiny_model, tmp_path / "state", "--alias", "tiny", "--samplers", "0", env=env)
    try:
        clients = [
            subprocess.Popen(
                [sys.executable, "-c", CLIENT, name], env={**os.environ, **env}, stdout=subprocess.PIPE, text=True
            )
            for name in ("left", "rightmost")
        ]
        for client in clients:
            out, _ = client.communicate(timeout=120)
            losses = [float(line.split()[0]) for line in out.splitlines()]
            assert client.returncode == 0
            assert len(losses) == 5
            assert losses[-1] < losses[0]
        watched = run_cli("watch", "--since", "0", "--count", "22", env=env)
        assert watched.returncode == 0
        for name in ("left", "rightmost"):
            seqs = [line.split()[2] for line in watched.stdout.splitlines() if line.split()[1] == name]
            assert seqs == [f"seq={n}" for n in range(11)]
    finally:
        running.stop()
    assert processes_of(running.state) == []


async def check_goes_on(service: Service, step: int) -> None:
    async with connect(service.state) as client:
        model = client.model("lasting")
        assert (await model.info()).event.result["step"] == step
        await model.forward_backward(supervised(step), "cross_entropy")
        assert (await model.optim_step(lr=1e-2)).metrics["step"] == step + 1


@pytest.mark.timeout(300)
async def test_a_service_ends_within_ten_seconds_and_goes_on_where_it_was_on_the_same_state(
    tiny_model: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    options = ("--alias", "tiny", "--samplers", "0")
    running = start_service(tiny_model, state, *options)
    async with connect(state) as client:
        model = await client.create_model("tiny", name="lasting", lora_rank=4)
        await model.forward_backward(supervised(0), "cross_entropy")
        await model.optim_step(lr=1e-2)
        before = (await model.forward(supervised(9), "cross_entropy")).metrics
    assert running.stop(signal.SIGTERM) < 10
    assert running.process.returncode == 0
    assert processes_of(state) == []
    again = start_service(tiny_model, state, *options)
    try:
        async with connect(state) as client:
            assert (await client.model("lasting").forward(supervised(9), "cross_entropy")).metrics == before
        await check_goes_on(again, 1)
    finally:
        assert again.stop(signal.SIGINT) < 10
    assert processes_of(state) == []

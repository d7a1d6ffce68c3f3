"""Starting and ending a service: what it needs, what it refuses, what it leaves behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from batches import rollouts, supervised
from serving import Service, processes_of, run_cli, start_service

from tinsmith.api import Datum, connect
from tinsmith.bus.protocol.errors import Gap
from tinsmith.bus.redis.embedded import EmbeddedServer, find_server


def refused(*args: str, env: dict[str, str] | None = None) -> str:
    """What a service that can't start says; it must end by itself, with code 1 and nothing on stdout."""
    done = run_cli("serve", "--port", "0", *args, env=env, timeout=120)
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


def test_a_port_in_use_is_refused_and_named(tiny_model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = refused("--model", str(tiny_model), "--state", str(tmp_path / "state"), "--port", str(port))
    assert "PortInUse" in said
    assert str(port) in said


def test_a_wrong_metric_declaration_is_refused_and_named(tiny_model: Path, tmp_path: Path) -> None:
    overlay = tmp_path / "mine.toml"
    overlay.write_text('[mine]\nreduce = "median"\nsource = ["loss"]\nunit = "nats"\nhelp = "No such reduction."\n')
    said = refused("--model", str(tiny_model), "--state", str(tmp_path / "state"), "--metrics", str(overlay))
    assert "InvalidCatalogue" in said
    assert "mine" in said


def test_a_losses_module_that_does_not_exist_is_refused_and_named(tiny_model: Path, tmp_path: Path) -> None:
    said = refused("--model", str(tiny_model), "--state", str(tmp_path / "state"), "--losses", "no.such.module")
    assert "no.such.module" in said


@contextmanager
def running_redis(folder: Path) -> Iterator[tuple[str, int]]:
    """A server of the machine's own (redis-server where it is installed), as a user runs one: by TCP."""
    binary = shutil.which("redis-server") or str(find_server())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "eady to accept connections" not in process.stdout.readline():
        assert process.poll() is None
    try:
        yield f"redis://127.0.0.1:{port}", port
    finally:
        process.terminate()
        process.wait(10)


def test_a_server_that_may_drop_commands_is_refused_with_the_remedy(tiny_model: Path, tmp_path: Path) -> None:
    with running_redis(tmp_path) as (url, port):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(b"CONFIG SET maxmemory-policy allkeys-lru\r\n")
            assert raw.recv(64).startswith(b"+OK")
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


OVERLAY = """
[worst_loss]
reduce = "max"
source = ["loss"]
unit = "nats"
help = "The largest loss of any datum."

[sequences]
rename = "episodes"

[squared_error]
reduce = "sum"
source = ["squared_error"]
unit = "nats^2"
help = "The column of a loss of the user's own."
"""

LOSSES = """
from tinsmith.actors.engine.losses.registry import Loss, LossOutput, keep


def pull(tokens, config):
    error = keep(tokens.mask, tokens.logprobs - config["target"])
    return LossOutput(error.square(), tokens.mask, {"squared_error": error.square().sum(-1)})


def register(registry):
    from tinsmith.actors.engine.losses.registry import ConfigField

    registry.register(Loss("pull", pull, config=(ConfigField("target", float, -1.0),), columns=("squared_error",)))
"""


@pytest.fixture(scope="module")
def own_redis(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, dict[str, str]]]:
    """A service of one rank on a server of the machine's own, with a metric overlay and a loss of the user's."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.toml").write_text(OVERLAY)
    (folder / "my_losses.py").write_text(LOSSES)
    with running_redis(folder) as (url, _):
        env = {"REDIS_URL": url, "PYTHONPATH": str(folder)}
        options = ["--ranks", "1", "--samplers", "0", "--metrics", str(folder / "mine.toml"), "--losses", "my_losses"]
        running = start_service(tiny_model, folder / "state", "--alias", "tiny", *options, env=env)
        yield running, {"REDIS_URL": url}
        running.stop()
        assert processes_of(running.state) == []


def test_two_programs_drive_two_models_over_redis_url_and_a_third_follows_from_the_beginning(
    own_redis: tuple[Service, dict[str, str]],
) -> None:
    _, env = own_redis
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
    watched = run_cli("watch", "--since", "0", "--models", "left", "rightmost", "--count", "22", env=env)
    assert watched.returncode == 0
    for name in ("left", "rightmost"):
        seqs = [line.split()[2] for line in watched.stdout.splitlines() if line.split()[1] == name]
        assert seqs == [f"seq={n}" for n in range(11)]


async def test_a_metric_is_added_or_renamed_by_one_toml_entry_and_a_loss_by_one_module(
    own_redis: tuple[Service, dict[str, str]],
) -> None:
    _, env = own_redis
    async with connect(env["REDIS_URL"]) as client:
        model = await client.create_model("tiny", name="measured", lora_rank=4)
        data = supervised(1)
        metrics = (await model.forward_backward(data, "cross_entropy")).metrics
        each = [(await model.forward([datum], "cross_entropy")).metrics["loss:sum"] for datum in data]
        assert metrics["worst_loss:max"] == pytest.approx(max(each), rel=1e-5)
        assert metrics["episodes:sum"] == len(data)
        assert "sequences:sum" not in metrics
        bare = [Datum(d.tokens, {"target_tokens": d.inputs["target_tokens"]}) for d in data]
        pulled = await model.forward_backward(bare, "pull", {"target": -2.0})
        expected = sum(float(((array.astype(float) + 2.0) ** 2).sum()) for array in pulled.logprobs)
        assert pulled.metrics["squared_error:sum"] == pytest.approx(expected, rel=1e-5)
        async for seen in client.events(["measured"], since="0"):
            if not isinstance(seen, Gap) and seen.event.id == pulled.event.id:
                assert seen.event.metrics == pulled.metrics
                break


async def test_one_rank_and_two_ranks_give_the_same_numbers(
    service: Service, own_redis: tuple[Service, dict[str, str]]
) -> None:
    _, env = own_redis
    told = []
    for url in (str(service.state), env["REDIS_URL"]):
        async with connect(url) as client:
            model = await client.create_model("tiny", lora_rank=4)
            first = model.forward_backward(rollouts(1), "ppo")
            step = model.optim_step(lr=1e-2, grad_clip_norm=0.5)
            after = model.forward(rollouts(2), "ppo")
            told.append([await first, await step, await after])
    cut = {"tokens_computed:sum", "padding_share:mean", "padding_share:sum", "micro_batches:sum"}
    renamed = {"episodes:sum": "sequences:sum"}
    for two, one in zip(*told, strict=True):
        metrics = {renamed.get(k, k): v for k, v in one.metrics.items() if not k.startswith(("worst_loss", "squared"))}
        assert metrics.keys() == two.metrics.keys()
        for key in metrics.keys() - cut:
            assert metrics[key] == pytest.approx(two.metrics[key], rel=1e-5, abs=1e-9), key
    for two, one in zip(told[0][2].logprobs, told[1][2].logprobs, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5)


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
        # A user who loses patience, and a `timeout` in front of us, ask more than once.
        assert again.stop(signal.SIGINT, insist=0.2) < 10
    assert processes_of(state) == []

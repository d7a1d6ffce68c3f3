"""The HTTP door's application in a thread of this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import uvicorn

from tinsmith.api.http.app import make_app
from tinsmith.api.http.settings import HttpSettings


@dataclass
class Running:
    """An application that answers at `url`."""

    url: str
    settings: HttpSettings

    def http(self, key: str = "tml-one") -> httpx.Client:
        """A plain client with this key."""
        return httpx.Client(base_url=self.url, headers={"x-api-key": key}, timeout=60)


@contextmanager
def running(settings: HttpSettings) -> Iterator[Running]:
    """The application on a free port until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = uvicorn.Config(make_app(settings), port=port, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive(), "the application did not start"
        assert time.monotonic() < deadline, "the application did not start"
        time.sleep(0.02)
    yield Running(f"http://127.0.0.1:{port}", settings)
    server.should_exit = True
    thread.join(10)

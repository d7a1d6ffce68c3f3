"""The HTTP door's application in a thread of this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from serving import Service

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


def settings_of(service: Service, model: Path) -> HttpSettings:
    """Of an application over a service of this model."""
    return HttpSettings(
        bus_url=(service.state / "bus.url").read_text().strip(),
        bus="tinsmith",
        alias="tiny",
        aliases=("local/tiny",),
        model_path=str(model),
        state_dir=str(service.state),
    )


@contextmanager
def running(settings: HttpSettings, around: Callable[[Any], Any] = lambda app: app) -> Iterator[Running]:
    """The application on a free port until the block ends; `around` may wrap it to see what is asked."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = uvicorn.Config(around(make_app(settings)), port=port, log_level="error", timeout_graceful_shutdown=1)
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

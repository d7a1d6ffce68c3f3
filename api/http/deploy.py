"""The HTTP gateway on Ray Serve: deployed on the Ray that this process has joined."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import socket
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tinsmith.api.http.settings import HttpSettings
from tinsmith.bus.protocol.errors import PortInUse, StartupError

if TYPE_CHECKING:
    from tinsmith.actors.service.options import ServiceOptions

APP = "tinsmith"
MAX_ONGOING = 20_000
"""Requests that one replica holds at once, most of them waiting for a result."""
KEYS_VARIABLE = "TINSMITH_API_KEYS"


def prepare_environment() -> None:
    """Settings that Serve's own processes read when they start; call it before Ray is started. What is set stays.

    HAProxy in front of the replicas, instead of a proxy in Python, takes requests about eight times as fast.
    """
    defaults = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # The application never blocks its loop: a thread of its own would only hand every message back and forth,
        # which costs a replica a fifth of its time.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        # Each request would be told to a Python process that counts it for a dashboard; /metrics is our own.
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        # Wake-ups of an idle service: ten times a second each, if left to Serve.
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
        # Ends with the service, instead of half a minute after it.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",
        "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "0.5",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "2",
        "RAY_SERVE_HAPROXY_MAXCONN": str(_most_connections()),
        "RAY_SERVE_HAPROXY_NBTHREAD": "2",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{_scratch()}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{_scratch()}/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": _scratch(),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{_scratch()}/server-state",
        # Its own metrics and statistics: fixed ports would keep two services off one machine.
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(_free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(_free_port()),
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


async def start_http(
    options: ServiceOptions, host: str, port: int, *, aliases: Sequence[str] = (), replicas: int = 1
) -> None:
    """Answer HTTP at (host, port). `aliases`: more names of the base model.

    Raises PortInUse, or StartupError when the application does not come up.
    """
    check_port(host, port)
    keys = tuple(key for key in os.environ.get(KEYS_VARIABLE, "").split(",") if key)
    settings = HttpSettings(
        bus_url=options.bus_url,
        bus=options.bus,
        alias=options.alias,
        aliases=tuple(aliases),
        model_path=options.model_path,
        state_dir=options.state_dir,
        api_keys=keys,
    )
    await asyncio.to_thread(_run, settings, host, port, replicas)


async def stop_http() -> None:
    """Take the application down; requests that wait for a result are let go."""
    from ray import serve

    await asyncio.to_thread(serve.shutdown)


def _run(settings: HttpSettings, host: str, port: int, replicas: int) -> None:
    from fastapi import FastAPI
    from ray import serve
    from ray.serve.schema import LoggingConfig

    from tinsmith.api.http.app import make_app

    logging.getLogger("ray.serve").setLevel(logging.ERROR)

    serve.start(http_options={"host": host, "port": port, "request_timeout_s": None}, proxy_location="HeadOnly")

    # A plain function, which is how Serve knows that the replica is to make the application itself.
    def build() -> FastAPI:
        app = make_app(settings)
        _prepare_replica()
        return app

    deployment = serve.deployment(
        serve.ingress(build)(),
        name="http",
        num_replicas=replicas,
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=2,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=5,
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
    )
    try:
        serve.run(deployment.bind(), name=APP, route_prefix="/")
    except RuntimeError as error:
        serve.shutdown()
        raise StartupError(f"the HTTP gateway did not come up: {error}", remedy="See Ray's logs.") from error


def _prepare_replica() -> None:
    """Make this process fit to hold thousands of requests at once."""
    # Each of them is an open file.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # Python's collector looks at everything that waits, again and again: with its defaults the price of one waiting
    # future grows with their number. What was imported is never garbage.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def check_port(host: str, port: int) -> None:
    """Raises PortInUse when something else listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortInUse(f"{host}:{port} can't be listened on: {error}", remedy="Use another --port.") from None


def _scratch() -> str:
    return f"{tempfile.gettempdir()}/ts-haproxy-{os.getuid()}-{os.getpid()}"


def _most_connections() -> int:
    """Of clients at once; HAProxy ends at its start when the open files for them (2.5 each) exceed the limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 16384 if most == resource.RLIM_INFINITY else min(16384, most // 3)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

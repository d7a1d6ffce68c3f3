"""Start and stop one service on a Ray cluster: the way from options to a coordinator that takes commands."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from tinsmith.actors.service.coordinator import Coordinator
from tinsmith.actors.service.options import ServiceOptions
from tinsmith.actors.workers.group import CPU_SHARE, destroy_group, destroy_samplers
from tinsmith.bus.protocol.errors import StartupError, TinsmithError

log = logging.getLogger("tinsmith.service")

POLL_SECONDS = 0.2
"""How often the phase of a start is asked for."""
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ranks wait for each other without spinning.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Ray's workers would otherwise yield to every other program on the machine.
    "RAY_worker_niceness": "0",
    # Its records of tasks and metrics for a dashboard that is not started cost a quarter of what an idle service uses.
    "RAY_task_events_report_interval_ms": "0",
    "RAY_core_worker_internal_heartbeat_ms": "10000",
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_timeline": "0",
    "RAY_event_stats": "0",
}
"""Set, where the user has not, before a Ray is started here; its workers inherit it."""
RAY_ATTEMPTS = 3
STOP_SECONDS = 6.0
"""How long a coordinator may take to end before its actors are taken down without it."""


def start_ray(address: str | None) -> bool:
    """Join the Ray cluster at `address`, or start one on this machine; returns whether it was started here."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    common: dict[str, Any] = {"logging_level": "error", "log_to_driver": False, "namespace": "tinsmith"}
    if address is not None:
        try:
            ray.init(address=address, **common)
        except ConnectionError as error:
            raise StartupError(
                f"no Ray cluster answers at {address!r}: {error}", remedy="Start it, or leave --ray out."
            ) from error
        return False
    # The path of Ray's sockets must stay below about 100 bytes, so its folder can't lie in the state directory.
    folder = Path(tempfile.gettempdir()) / f"ts-ray-{os.getuid()}"
    for left in reversed(range(RAY_ATTEMPTS)):
        try:
            ray.init(address="local", include_dashboard=False, _temp_dir=str(folder), **common)
            return True
        except Exception as error:
            # Ray gives its daemons 30 s, which a machine busy with other work can exceed.
            ray.shutdown()
            if "timed out during startup" not in str(error) or not left:
                raise StartupError(f"Ray did not start: {error}", remedy=f"See the logs in {folder}.") from error
    raise AssertionError("unreachable")


def stop_ray() -> None:
    """Leave the cluster; one that was started here ends."""
    ray.shutdown()


async def start_service(options: ServiceOptions, progress: Callable[[str], None]) -> tuple[Any, dict[str, Any]]:
    """A coordinator that takes commands, and the facts of its base model. `progress` hears each new phase.

    Raises the typed cause when it can't start; nothing is left running then.
    """
    await stop_service(options)
    actor = ray.remote(Coordinator)
    coordinator = actor.options(
        name="coordinator",
        namespace=options.service,
        lifetime="detached",
        num_cpus=CPU_SHARE,
        max_restarts=-1,
        max_concurrency=1000,
    ).remote(options)
    ready = asyncio.wrap_future(coordinator.ready.remote().future())
    seen = ""
    try:
        while True:
            done, _ = await asyncio.wait({ready}, timeout=POLL_SECONDS)
            if done:
                return coordinator, ready.result()
            phase = await coordinator.phase.remote()
            if phase != seen:
                progress(phase)
                seen = phase
    except BaseException as error:
        # Whoever is interrupted here does not wait for it any more, and must not hear of its end either.
        ready.add_done_callback(lambda done: done.cancelled() or done.exception())
        await stop_service(options)
        cause = getattr(error, "cause", None)
        if isinstance(cause, TinsmithError):
            raise cause from None
        if isinstance(error, ray.exceptions.RayError):
            raise StartupError(f"the coordinator failed: {error}") from error
        raise


async def stop_service(options: ServiceOptions) -> None:
    """End a service's coordinator, ranks and samplers, if there are any."""
    try:
        coordinator = ray.get_actor("coordinator", namespace=options.service)
    except ValueError:
        return
    try:
        await asyncio.wait_for(coordinator.stop.remote(), STOP_SECONDS)
    except (TimeoutError, ray.exceptions.RayError) as error:
        log.warning("the coordinator does not answer, its actors are taken down without it: %r", error)
        ray.kill(coordinator, no_restart=True)
        await asyncio.gather(destroy_group(options), destroy_samplers(options))
    else:
        ray.kill(coordinator, no_restart=True)

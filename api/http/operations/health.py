"""/health for people and probes, /metrics for Prometheus. Neither asks for a key, neither names a tenant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import PlainTextResponse

from tinsmith.api.http.responses import json_response
from tinsmith.api.http.tinker.startup import gateway_of
from tinsmith.bus.protocol.errors import BusError

router = APIRouter()

COUNTERS = {
    "steps": "Steps that the ranks carried out.",
    "rebuilds": "Times that the ranks were built anew.",
    "snapshots": "Automatic snapshots.",
    "replayed": "Commands that were applied again after a failure.",
    "replay_differs": "Replayed commands whose metrics were not those published.",
    "given_up": "Commands given up because they took their ranks down.",
    "samples": "Sampling commands answered.",
    "sampled_tokens": "Tokens sampled.",
    "replicas_lost": "Samplers that died.",
}

DISK = {
    "checkpoints_bytes": "Disk taken by checkpoints.",
    "versions_bytes": "Disk taken by published versions.",
    "snapshots_bytes": "Disk taken by automatic snapshots.",
    "free_bytes": "Free space on the disk of the state folder.",
}


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the bus answers and the service takes commands; else 503 that says which does not."""
    gateway = gateway_of(request)
    try:
        bus = asdict(await gateway.bus.info())
        status = await gateway.status()
    except BusError as error:
        return json_response({"status": "no bus", "detail": str(error)}, 503)
    bus.pop("incarnation")
    if status is None or status["phase"] != "ready":
        return json_response({"status": "no service", "bus": bus}, 503)
    trainer = {key: value for key, value in status["trainer"].items() if key not in ("pid", "pids")}
    answer = {"status": "ok", "base": status["base"], "since": status["since"], "models": len(status["models"])}
    parts = {"trainer": trainer, "sampler": status["sampler"], "disk": status["disk"], "bus": bus}
    return json_response({**answer, **parts})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """The service's counters and gauges in Prometheus's text format."""
    gateway = gateway_of(request)
    status = await gateway.status()
    info = await gateway.bus.info()
    gauges: dict[str, tuple[str, float]] = {
        "up": ("1 while the service takes commands.", float(status is not None and status["phase"] == "ready")),
        "bus_used_bytes": ("Memory of the bus's server.", info.used_bytes),
        "sessions": ("Sessions that live.", len(await gateway.store.sessions())),
    }
    counters: dict[str, tuple[str, float]] = {}
    if status is not None:
        gauges["models"] = ("Models held.", len(status["models"]))
        gauges["sampling"] = ("Requests with the samplers.", sum(status["sampler"]["busy"]))
        gauges.update({f"disk_{name}": (text, status["disk"][name]) for name, text in DISK.items() if status["disk"]})
        told = {**status["trainer"], **status["sampler"]}
        counters = {f"{name}_total": (text, told[name]) for name, text in COUNTERS.items() if name in told}
    return PlainTextResponse(_exposition(gauges, "gauge") + _exposition(counters, "counter"))


def _exposition(values: Mapping[str, tuple[str, Any]], kind: str) -> str:
    return "".join(
        f"# HELP tinsmith_{name} {text}\n# TYPE tinsmith_{name} {kind}\ntinsmith_{name} {value}\n"
        for name, (text, value) in values.items()
    )

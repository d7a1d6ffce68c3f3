"""The processes of one service: which are ours, which are Ray's, and what they use."""

from __future__ import annotations

import re

import psutil  # type: ignore[import-untyped]

_ACTORS = {"Coordinator": "coordinator", "TrainerRank": "rank", "SamplerReplica": "sampler"}


def service_process(state: str) -> psutil.Process:
    """The `tinsmith serve` on this state folder, a child of this program."""
    for child in psutil.Process().children():
        if state in child.cmdline():
            return child
    raise RuntimeError(f"no child of this program serves {state}")


def own_processes(state: str) -> dict[str, psutil.Process]:
    """Name -> process of the parts of a service that are ours, the bus's server included."""
    serve = service_process(state)
    found = {"serve": serve}
    for process in serve.children(recursive=True):
        words = process.cmdline()
        actor = re.match(r"ray::(\w+)", words[0]) if words else None
        if actor is not None and actor[1] in _ACTORS:
            name = _ACTORS[actor[1]]
            count = sum(other.startswith(name) for other in found)
            found[f"{name} {count}" if name == "rank" or count else name] = process
        elif state in " ".join(words) and re.search(r"(valkey|redis)-server", words[0]):
            found["bus server"] = process
    return found


def door_processes(state: str) -> list[psutil.Process]:
    """The replicas of a service's HTTP door, and the proxy before them."""
    started = service_process(state).children(recursive=True)
    words = [(process, process.cmdline()) for process in started]
    return [process for process, line in words if line and re.match(r"ray::ServeReplica|(.*/)?haproxy$", line[0])]


def ray_processes(state: str) -> list[psutil.Process]:
    """Ray's own processes under a service."""
    ours = {process.pid for process in own_processes(state).values()}
    return [process for process in service_process(state).children(recursive=True) if process.pid not in ours]


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time used so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def megabytes(process: psutil.Process) -> float:
    """Resident memory."""
    return float(process.memory_info().rss) / 1e6

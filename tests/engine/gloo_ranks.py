"""Real gloo ranks for tests: `run_ranks(2, function, args...)` runs `function(mesh, args...)` in two processes.

The processes are forked from a server that has imported torch and the engine once, so a run costs well under a second.
The function is a top-level function of a test file; it is found again by file and name. Results must be picklable.
"""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "transformers", "peft", "tinsmith.actors.engine.engine", "gloo_ranks"])


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """What the function returned on each rank; raises AssertionError with the traceback of a rank that failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    file, name = inspect.getfile(function), function.__name__
    children, pipes = [], []
    for rank in range(world):
        here, there = _CONTEXT.Pipe(duplex=False)
        child = _CONTEXT.Process(target=_rank_main, args=(there, file, name, rank, world, port, args), daemon=True)
        child.start()
        there.close()
        children.append(child)
        pipes.append(here)
    try:
        results = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(timeout), f"rank {rank} gave no result within {timeout} s"
            ok, value = pipe.recv()
            assert ok, f"rank {rank} failed:\n{value}"
            results.append(value)
        return results
    finally:
        for child in children:
            child.join(5)
            child.kill()


def _rank_main(pipe: Connection, file: str, name: str, rank: int, world: int, port: int, args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
        mesh = init_device_mesh("cpu", (world,))
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        pipe.send((True, getattr(module, name)(mesh, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        dist.destroy_process_group()

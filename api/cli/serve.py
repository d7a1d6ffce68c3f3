"""`tinsmith serve`: bring up the bus, Ray and the service, say `ready`, and end cleanly on Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from pydantic import ValidationError

from tinsmith.actors.metrics import Catalogue
from tinsmith.actors.service.options import ServiceOptions
from tinsmith.api.client.address import URL_FILE, default_cache, default_state
from tinsmith.api.http.deploy import check_port, prepare_environment, start_http, stop_http
from tinsmith.bus.protocol.errors import NotAModel, StartupError, TinsmithError
from tinsmith.bus.redis.embedded import EmbeddedServer
from tinsmith.bus.selftest import self_test

WATCH_SECONDS = 0.5
"""How often the embedded server is looked at."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tinsmith serve`."""
    parser.add_argument(
        "--model", required=True, help="folder of a causal LM (config.json and safetensors), or a .gguf"
    )
    parser.add_argument("--alias", help="name by which clients ask for it (default: the folder's name)")
    parser.add_argument("--ranks", type=int, default=2, help="trainer ranks that share the model (default 2)")
    parser.add_argument("--samplers", type=int, default=1, help="sampler replicas (default 1)")
    parser.add_argument("--state", type=Path, default=None, help="folder for the bus's log, snapshots and checkpoints")
    parser.add_argument(
        "--redis", default=None, help="redis:// URL of a server of yours (default: $REDIS_URL, or embedded)"
    )
    parser.add_argument("--bus", default="tinsmith", help="name of the bus, to keep services on one server apart")
    parser.add_argument("--ray", default=None, help="address of a Ray cluster (default: $RAY_ADDRESS, or a local one)")
    parser.add_argument("--host", default="127.0.0.1", help="address of the HTTP door (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port of the HTTP door (default 8000)")
    parser.add_argument("--http-replicas", type=int, default=1, help="processes behind the HTTP door (default 1)")
    parser.add_argument("--no-http", dest="http", action="store_false", help="open no HTTP door")
    parser.add_argument("--also-known-as", action="append", default=[], metavar="NAME", help="more names over HTTP")
    parser.add_argument("--token-budget", type=int, default=4096, help="padded tokens a micro-batch (default 4096)")
    parser.add_argument("--snapshot-steps", type=int, default=50, help="optimizer steps between snapshots (default 50)")
    parser.add_argument("--sampler-threads", type=int, default=None, help="threads of a sampler (default: its share)")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="less memory for more compute")
    parser.add_argument(
        "--keep-gathered", type=int, default=1024, metavar="MIB", help="largest base that each rank keeps whole (1024)"
    )
    parser.add_argument("--losses", action="append", default=[], metavar="MODULE", help="module that registers losses")
    parser.add_argument(
        "--metrics", action="append", default=[], metavar="TOML", help="overlay over the metric catalogue"
    )


def serve(args: argparse.Namespace) -> int:
    """Run until a signal; returns the exit code. Raises StartupError and its kin before `ready`."""
    model = Path(args.model).expanduser().resolve()
    _check_early(model, args)
    # Until the event loop has handlers of its own, an early SIGTERM must still run what takes the bus down.
    signal.signal(signal.SIGTERM, _interrupt)
    alias = args.alias or model.stem
    model = _unpacked(model)
    state = Path(args.state if args.state is not None else default_state()).expanduser().resolve()
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    redis = args.redis or os.environ.get("REDIS_URL")
    _say("starting the bus")
    server = None if redis else EmbeddedServer()
    try:
        url = server.start(state) if server is not None else str(redis)
        return asyncio.run(_serve(args, _options(args, model, alias, state, url), server))
    finally:
        # A second signal must not cut short what takes the bus down.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        (state / URL_FILE).unlink(missing_ok=True)
        if server is not None:
            server.stop()


def _check_early(model: Path, args: argparse.Namespace) -> None:
    """Refuse at once what needs no torch and no Ray to be refused; the ranks check the rest when they load."""
    if not (model.suffix == ".gguf" or (model / "config.json").is_file() or any(model.glob("*.gguf"))):
        what = "is not a model" if model.exists() else "does not exist"
        raise NotAModel(f"{model} {what}", remedy="Name a folder with config.json and *.safetensors, or a .gguf file.")
    if args.http:
        check_port(args.host, args.port)
    Catalogue.load([Path(overlay) for overlay in args.metrics])
    for module in args.losses:
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise StartupError(f"losses module {module!r} can't be found", remedy="Install it, or set PYTHONPATH.")


def _unpacked(model: Path) -> Path:
    """The model as a folder that loads fast; a .gguf is unpacked once, by a process that may import torch."""
    if model.suffix != ".gguf" and (model / "config.json").is_file():
        return model
    _say(f"reading {model.name} (a GGUF is unpacked once, into {default_cache()})")
    command = [sys.executable, "-m", "tinsmith.actors.engine.model.gguf", str(model), str(default_cache())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout.strip().rpartition("\n")[2]
    if done.returncode == 0:
        return Path(said)
    if said.startswith("{"):
        raise TinsmithError.from_wire(json.loads(said))
    raise StartupError(f"{model} could not be unpacked: {done.stderr.strip()[-500:]}")


def _options(args: argparse.Namespace, model: Path, alias: str, state: Path, url: str) -> ServiceOptions:
    try:
        return ServiceOptions(
            model_path=str(model),
            alias=alias,
            state_dir=str(state),
            bus_url=url,
            bus=args.bus,
            ranks=args.ranks,
            samplers=args.samplers,
            token_budget=args.token_budget,
            sampler_threads=args.sampler_threads or max(1, (os.cpu_count() or 1) // max(1, args.samplers)),
            snapshot_steps=args.snapshot_steps,
            gradient_checkpointing=args.gradient_checkpointing,
            keep_gathered_mib=args.keep_gathered,
            losses=tuple(args.losses),
            metrics=tuple(os.path.abspath(overlay) for overlay in args.metrics),
        )
    except ValidationError as error:
        first = error.errors()[0]
        option = "--" + ".".join(map(str, first["loc"])).replace("_", "-")
        raise StartupError(f"{option}: {first['msg']}", remedy="See tinsmith serve --help.") from None


async def _serve(args: argparse.Namespace, options: ServiceOptions, server: EmbeddedServer | None) -> int:
    stop = asyncio.Event()
    _heed_signals(stop)
    url = options.bus_url
    info = await self_test(url)
    _say(f"bus: {info.server} {info.version}, appendfsync {info.appendfsync or 'off'}, at {url}")
    _say("starting Ray")
    if args.http:
        prepare_environment()
    # Ray is slow to import; nothing before this line needs it.
    from tinsmith.actors.service.start import start_ray, start_service, stop_ray, stop_service

    await asyncio.to_thread(start_ray, args.ray or os.environ.get("RAY_ADDRESS"))
    # Again: Ray has just installed handlers of its own.
    _heed_signals(stop)
    try:
        starting = asyncio.create_task(start_service(options, _say))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 130
        _, facts = starting.result()
        try:
            door = "no HTTP"
            if args.http:
                _say("opening the HTTP door")
                await start_http(options, args.host, args.port, aliases=args.also_known_as, replicas=args.http_replicas)
                door = f"http://{args.host}:{args.port}"
            (Path(options.state_dir) / URL_FILE).write_text(url)
            print(
                f"ready {options.alias}: {facts['architecture']}, {facts['parameters'] / 1e6:.1f} M parameters, "
                f"context {facts['context']}, {facts['ranks']} ranks on {facts['device']}, "
                f"{options.samplers} samplers, bus {url}, {door}",
                flush=True,
            )
            watching = asyncio.create_task(_watch_server(server)) if server is not None else None
            await stopping
            if watching is not None:
                watching.cancel()
        finally:
            _say("stopping")
            await asyncio.gather(stop_service(options), *([stop_http()] if args.http else []))
    finally:
        # The bus first: while Ray ends it takes the signals from us, and a second one would leave the server behind.
        if server is not None:
            await asyncio.to_thread(server.stop)
        await asyncio.to_thread(stop_ray)
    return 0


async def _watch_server(server: EmbeddedServer) -> None:
    """Bring the embedded server back when it dies: its log holds every accepted command."""
    while True:
        try:
            if await asyncio.to_thread(server.revive):
                _say("the bus server had died and was started again")
        except StartupError as error:
            _say(f"the bus server died and can't be started again: {error}")
        await asyncio.sleep(WATCH_SECONDS)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _heed_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def heed(number: int, frame: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)

    # Not by the loop's own means: when it closes it gives the signals back, while there is still a bus to take down.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, heed)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

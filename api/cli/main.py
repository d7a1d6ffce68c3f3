"""The command line `tinsmith`. Each subcommand imports what it needs when it runs: `tinsmith metrics` needs no Ray."""

from __future__ import annotations

import argparse
import asyncio
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from tinsmith.api.cli import export as exporting
from tinsmith.api.cli import serve as serving
from tinsmith.bus.protocol.errors import Gap, TinsmithError

COMMANDS = "tinsmith.commands"
"""Entry points of subcommands that live above this layer (`demo`, `bench`); each is a function that adds its parser."""
KEYS_SHOWN = 8
"""Keys of one kind that `tinsmith keys` lists one by one in a group, unless it is asked for all."""


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns its exit code. A typed error is printed with its remedy, and the code is 1."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except TinsmithError as error:
        print(f"tinsmith: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tinsmith", description="A training service for LLM post-training.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="hold a model and take commands")
    serving.add_arguments(serve)
    serve.set_defaults(run=serving.serve)

    status = commands.add_parser("status", help="what the service is doing")
    _address(status)
    status.set_defaults(run=lambda args: asyncio.run(_status(args)))

    watch = commands.add_parser("watch", help="events as they come, one line each")
    _address(watch)
    watch.add_argument("--since", default="$", help="$ from now on (default), 0 from the beginning")
    watch.add_argument("--models", nargs="*", default=None, help="only these models")
    watch.add_argument("--count", type=int, default=None, help="end after so many events")
    watch.set_defaults(run=lambda args: asyncio.run(_watch(args)))

    keys = commands.add_parser("keys", help="what lies on the bus: its keys, their sizes and meaning")
    _address(keys)
    keys.add_argument("--all", action="store_true", help="every key; else many of one kind are summed up in a line")
    keys.set_defaults(run=lambda args: asyncio.run(_keys(args)))

    export = commands.add_parser("export", help="a checkpoint or version as a PEFT adapter or a whole HF model")
    exporting.add_arguments(export)
    export.set_defaults(run=exporting.run)

    metrics = commands.add_parser("metrics", help="the catalogue of metrics")
    metrics.add_argument("--overlay", action="append", default=[], metavar="TOML", help="with this overlay applied")
    metrics.add_argument("--columns", action="store_true", help="the workers' columns, and which metrics use them")
    metrics.add_argument("--losses", action="append", default=[], metavar="MODULE", help="with this module's losses")
    metrics.set_defaults(run=_metrics)

    for entry in sorted(entry_points(group=COMMANDS), key=lambda entry: entry.name):
        entry.load()(commands)
    return parser


def _address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=None, help="redis:// or unix:// URL, or a state folder (default: $REDIS_URL)")
    parser.add_argument("--bus", default="tinsmith", help="name of the bus")


def _metrics(args: argparse.Namespace) -> int:
    from tinsmith.actors.metrics import Catalogue
    from tinsmith.actors.metrics.table import as_markdown, columns

    catalogue = Catalogue.load([Path(overlay) for overlay in args.overlay])
    if not args.columns:
        print(as_markdown(catalogue))
        return 0
    from tinsmith.actors.engine.losses.columns import COMMON_COLUMNS
    from tinsmith.actors.engine.losses.registry import load_losses

    losses = load_losses(*args.losses)
    produced = COMMON_COLUMNS.union(*(losses.get(name).columns for name in losses.names))
    for use in columns(catalogue, sorted(produced)):
        print(f"{use.column:24} {', '.join(use.keys) or '(no metric uses it)'}")
    return 0


async def _status(args: argparse.Namespace) -> int:
    from tinsmith.api import connect

    async with connect(args.url, bus=args.bus) as client:
        status = await client.status()
    if status is None:
        print("the bus answers, but no service runs on it", file=sys.stderr)
        return 1
    _print_tree(status)
    return 0


async def _keys(args: argparse.Namespace) -> int:
    from tinsmith.api.client.address import resolve_url
    from tinsmith.api.http.tenancy.store import KEYS as HTTP_KEYS
    from tinsmith.bus.connection import open_bus
    from tinsmith.bus.inventory import as_text, take_inventory

    async with await open_bus(resolve_url(args.url), args.bus) as bus:
        found = await take_inventory(bus, HTTP_KEYS)
    print(as_text(found, most=None if args.all else KEYS_SHOWN))
    return 0


def _print_tree(tree: dict[str, Any], depth: int = 0) -> None:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            print(f"{'  ' * depth}{key}:")
            _print_tree(value, depth + 1)
        else:
            print(f"{'  ' * depth}{key}: {value}")


async def _watch(args: argparse.Namespace) -> int:
    from tinsmith.api import connect

    left = args.count
    async with connect(args.url, bus=args.bus) as client:
        async for seen in client.events(args.models, since=args.since):
            if isinstance(seen, Gap):
                print(f"gap    {seen}", flush=True)
                continue
            event = seen.event
            told = " ".join(f"{key}={value:.6g}" for key, value in event.metrics.items())
            outcome = "ok" if event.ok else f"error {TinsmithError.from_wire(event.error or {})}"
            run = event.timing.get("run", 0.0)
            print(f"{seen.id} {event.model} seq={event.seq} {event.kind.value} {outcome} {run:.3f}s {told}", flush=True)
            if left is not None:
                left -= 1
                if left <= 0:
                    return 0
    return 0

"""The subcommands of `tinsmith` that live above the command line; what they need is imported when they run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_demo(commands: Any) -> None:
    """Add `tinsmith demo` to the subparsers of the command line."""
    parser = commands.add_parser("demo", help="train a small model by reinforcement, start to end")
    parser.add_argument("--model", choices=["smollm2", "tiny"], default="smollm2")
    parser.add_argument("--steps", type=int, default=None, help="RL steps (default: what the model needs)")
    parser.add_argument("--out", type=Path, default=Path("demo.png"), help="picture of the curves (default demo.png)")
    parser.add_argument("--url", default=None, help="a running service that holds the model under that name")
    parser.set_defaults(run=_demo)


def add_bench(commands: Any) -> None:
    """Add `tinsmith bench` to the subparsers of the command line."""
    parser = commands.add_parser("bench", help="measure this machine, side by side in one run")
    parser.add_argument("names", nargs="*", help="which benchmarks (default: all)")
    parser.set_defaults(run=_bench)


def _demo(args: argparse.Namespace) -> int:
    from tinsmith.ops.demo.main import main

    return main(args)


def _bench(args: argparse.Namespace) -> int:
    from tinsmith.ops.bench import main

    return main(args.names)

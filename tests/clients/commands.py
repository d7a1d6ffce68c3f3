"""How each command of the `tinker` program is called, as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
from bench import KEY, Bench
from tinker.cli.__main__ import main_cli

_DAY = ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z")
_STORED = {
    "version": 1,
    "default": "7",
    "keys": {
        "7": {
            "type": "generated",
            "key": KEY,
            "name": "laptop",
            "details": {"org_details": {"name": "o"}, "user_details": {"email": "e"}},
        }
    },
}

COMMANDS: dict[str, Callable[[Bench], list[str]]] = {
    "auth login": lambda b: [],
    "auth logout": lambda b: [],
    "auth status": lambda b: [],
    "auth whoami": lambda b: [],
    "billing checkpoint-storage": lambda b: [],
    "billing usage": lambda b: list(_DAY),
    "checkpoint delete": lambda b: [b.fresh_state(), "--yes"],
    "checkpoint download": lambda b: [b.state],
    "checkpoint info": lambda b: [b.state],
    "checkpoint list": lambda b: [],
    "checkpoint publish": lambda b: [b.state],
    "checkpoint push-hf": lambda b: [b.state],
    "checkpoint set-ttl": lambda b: [b.state, "--ttl", "86400"],
    "checkpoint unpublish": lambda b: [b.state],
    "model list": lambda b: [],
    "run info": lambda b: [b.run],
    "run list": lambda b: [],
    "session export-trace": lambda b: [b.session],
    "version": lambda b: [],
}


def commands(group: click.Group = main_cli, before: str = "") -> Iterator[str]:
    """Every command that the installed program has."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}"


def run(url: str, command: str, home: Path) -> subprocess.CompletedProcess[str]:
    """A command in an empty home; one that logs in or out finds the input and the file that it expects."""
    home.mkdir(exist_ok=True)
    words = command.split()
    if words == ["auth", "logout"]:
        (home / ".tinker").mkdir()
        (home / ".tinker" / "credentials.json").write_text(json.dumps(_STORED))
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("TINKER_", "HF_TOKEN"))}
    key = {} if words in (["auth", "login"], ["auth", "logout"]) else {"TINKER_API_KEY": KEY}
    return subprocess.run(
        [sys.executable, "-m", "tinker.cli", *words],
        cwd=home,
        env={**keep, **key, "HOME": str(home), "TINKER_BASE_URL": url, "TINKER_TELEMETRY": "0"},
        input=f"{KEY}\n" if words == ["auth", "login"] else "",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

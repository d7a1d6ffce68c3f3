"""The Lua scripts of the bus, each with the common head put before it, known to the server by its SHA1."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class Script:
    """One script: its name, its whole text and the SHA1 that EVALSHA takes."""

    name: str
    text: str
    sha: str


def _load() -> dict[str, Script]:
    texts = {
        entry.name.removesuffix(".lua"): entry.read_text("utf-8")
        for entry in resources.files(__name__).iterdir()
        if entry.name.endswith(".lua")
    }
    head = texts.pop("common")
    scripts = {}
    for name, text in sorted(texts.items()):
        whole = head + text
        scripts[name] = Script(name, whole, hashlib.sha1(whole.encode(), usedforsecurity=False).hexdigest())
    return scripts


SCRIPTS: dict[str, Script] = _load()
"""Every script by its name."""

"""What lies in the state folder and is held by nothing any more: found, judged, taken away.

What holds a folder:
- one whose name begins with a dot is a write or a removal under way; unchanged for an hour, one that a crash cut short;
- a version that its client did not name: its session, or a living one that samples from it;
- a snapshot: its model, as long as it is the newest that the bus has recorded;
- a model's empty folder: the model.
Checkpoints, and versions that their client named, are never judged here: a time to live or their owner ends them.

A bus that lost its data, or another one, knows nothing of what was here before it: snapshots from before the first
sweep of this life of the bus stay for ever, versions for a week.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tinsmith.api.http.tenancy.names import UNNAMED_PREFIX, is_session_model, session_of
from tinsmith.bus.protocol.envelope import new_id

if TYPE_CHECKING:
    from tinsmith.api.http.gateway import Gateway

log = logging.getLogger("tinsmith.http")

GUARD_SECONDS = 3600
"""Nothing younger is touched, so that no write under way is."""
BETWEEN_SECONDS = 60
"""The same for what was just replaced: its successor gets the name in the next instant, or never."""
ANCIENT_SECONDS = 7 * 86400
"""How long a version of before this life of the bus is kept."""
LIFE_FILE = "swept.json"
"""In the state folder: which life of which bus swept it last, and since when."""

_REPLACED = ".replaced"


@dataclass(frozen=True)
class Leftover:
    """A folder that may be one."""

    path: Path
    kind: Literal["temporary", "unnamed", "snapshot", "empty"]
    model: str
    changed: float
    """Unix seconds of the last change of anything in it."""


@dataclass(frozen=True)
class Holders:
    """What the bus and the store say of those that may hold something."""

    models: Mapping[str, Mapping[str, str]]
    """Model -> Bus.meta of it: empty when the bus does not know it."""
    sessions: frozenset[str]
    """Those that live."""
    sampled: frozenset[str]
    """Versions (model/name) that their sampling sessions are over."""
    since: float
    """Unix seconds of the first sweep in this life of the bus."""


async def collect(gateway: Gateway, now: float) -> list[Path]:
    """Take away what is due at `now` (Unix seconds); returns it. Raises BusError, OSError; may be repeated."""
    state = Path(gateway.settings.state_dir)
    found = await asyncio.to_thread(survey, state)
    since = await asyncio.to_thread(swept_since, state, gateway.bus.incarnation, now)
    # Asked after the disk was looked at: what is held now was held then, or is too young to be touched.
    models = {model: await gateway.bus.meta(model) for model in {one.model for one in found}}
    sessions = frozenset(await gateway.store.sessions())
    holders = Holders(models, sessions, await gateway.store.sampled(), since)
    due = [one for one in found if is_due(one, holders, now)]
    await asyncio.to_thread(take_away, due)
    return [one.path for one in due]


def survey(state: Path) -> list[Leftover]:
    """Everything that may be a leftover."""
    found = []
    for root in ("checkpoints", "published", "snapshots"):
        for folder in _folders(state / root):
            inside = _folders(folder)
            if not inside:
                found.append(Leftover(folder, "empty", folder.name, _changed(folder)))
            for place in inside:
                kind: Literal["temporary", "unnamed", "snapshot"] | None = None
                if place.name.startswith("."):
                    kind = "temporary"
                elif root == "snapshots" and place.name.isdigit():
                    kind = "snapshot"
                elif root == "published" and place.name.startswith(UNNAMED_PREFIX) and is_session_model(folder.name):
                    kind = "unnamed"
                if kind is not None:
                    found.append(Leftover(place, kind, folder.name, _changed(place)))
    return found


def is_due(one: Leftover, holders: Holders, now: float) -> bool:
    """Whether nothing holds it. Pure."""
    replaced = one.kind == "temporary" and one.path.name.endswith(_REPLACED)
    if now - one.changed < (BETWEEN_SECONDS if replaced else GUARD_SECONDS):
        return False
    meta = holders.models[one.model]
    live = meta.get("state") == "live"
    known_before = one.changed >= holders.since
    match one.kind:
        case "temporary":
            return True
        case "empty":
            return not live
        case "snapshot":
            if live:
                return int(one.path.name) < int(meta["snapshot"])
            return bool(meta) or known_before
        case "unnamed":
            held = session_of(one.model) in holders.sessions or f"{one.model}/{one.path.name}" in holders.sampled
            return not live and not held and (known_before or now - one.changed >= ANCIENT_SECONDS)


def take_away(due: Iterable[Leftover]) -> None:
    """Delete them; but what a crash left between two names gets its own back. One that can't be deleted stays."""
    for one in due:
        try:
            _take_away(one)
        except OSError as error:
            log.warning("%s can't be taken away: %s", one.path, error)


def _take_away(one: Leftover) -> None:
    if one.kind == "temporary" and one.path.name.endswith(_REPLACED):
        proper = one.path.with_name(one.path.name.removesuffix(_REPLACED)[1:])
        if not proper.exists():
            log.warning("%s was about to be replaced when its writer died, it stays", proper)
            one.path.rename(proper)
            return
    log.info("nothing holds %s any more", one.path)
    if one.kind == "empty":
        try:
            one.path.rmdir()
        except OSError as error:
            log.info("%s is in use again: %s", one.path, error)
        return
    delete_folder(one.path)


def replaced(path: Path) -> Path:
    """Where a folder lies in the instant in which its successor takes its name."""
    return path.with_name(f".{path.name}{_REPLACED}")


def delete_folder(path: Path) -> bool:
    """Delete a folder, out of sight at once; False when there is none."""
    gone = path.with_name(f".{path.name.removeprefix('.')[:100]}.{new_id()}.deleted")
    try:
        # Renamed first, so that whoever lists or loads meanwhile never finds half of it.
        path.rename(gone)
    except FileNotFoundError:
        return False
    shutil.rmtree(gone)
    return True


def swept_since(state: Path, incarnation: str, now: float) -> float:
    """Unix seconds since when this life of the bus sweeps the folder; `now`, noted down, when another did before."""
    file = state / LIFE_FILE
    try:
        told = json.loads(file.read_text())
        if told["incarnation"] == incarnation:
            return float(told["since"])
    except FileNotFoundError:
        pass  # Nobody did.
    except (ValueError, KeyError, TypeError) as error:
        log.warning("%s is damaged and written anew: %r", file, error)
    fresh = file.with_name(f".{file.name}.{new_id()}")
    fresh.write_text(json.dumps({"incarnation": incarnation, "since": now}))
    os.replace(fresh, file)
    return now


def _folders(place: Path) -> list[Path]:
    try:
        return sorted(Path(entry.path) for entry in os.scandir(place) if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _changed(folder: Path) -> float:
    """The time of the last change of the folder or what is in it: ctime, which copying does not carry over."""
    newest = 0.0
    for place in (folder, *folder.rglob("*")):
        try:
            newest = max(newest, place.stat(follow_symlinks=False).st_ctime)
        except FileNotFoundError:
            continue  # Its write or removal goes on this moment.
    return newest

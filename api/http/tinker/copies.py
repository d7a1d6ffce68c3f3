"""Tinker API: an immutable copy of a checkpoint or version, under a training run that no model is behind.

Invariant: a copy is whole or absent, and stays when its source is deleted or replaced: files are shared by hard links,
and nothing ever writes into a file that has its name.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from fastapi import APIRouter, Request, Response

from tinsmith.api.http.fields import field, maybe
from tinsmith.api.http.responses import json_response, read_object
from tinsmith.api.http.retention.catalog import saved
from tinsmith.api.http.tenancy.names import TinkerPath, copy_session_id, model_id, new_session_id, parse_path
from tinsmith.api.http.tenancy.records import ModelRecord, SaveRecord, SessionRecord
from tinsmith.api.http.tinker.startup import gateway_of, project_named
from tinsmith.bus.protocol.envelope import new_id
from tinsmith.bus.protocol.errors import InvalidInput, UnknownVersion

router = APIRouter(prefix="/api/v1")

LONGEST_LIFE = 100 * 365 * 86400
"""Seconds: what a date can still be told of."""
_MISSING = "Use a path that a save returned; its owner must have published it, if that is not you."


@router.post("/copy_weights")
async def copy_weights(request: Request) -> Response:
    """A copy of what the caller may read, in a session of its own in a project; sent again, the same one."""
    gateway, owner, body = gateway_of(request), gateway_of(request).owner(request), await read_object(request)
    refuse_token(request.headers.get("x-tinker-weights-access-token"))
    if body.get("session_id") is not None:
        raise InvalidInput(
            "a copy has a session of its own", remedy="Send destination_project_id instead.", field="session_id"
        )
    project = project_named(field(body, "destination_project_id", str))
    path = parse_path(field(body, "source_path", str))
    seconds = life_of(maybe(body, "ttl_seconds", int))
    run = await gateway.readable(request, path.stored)
    everything = await asyncio.to_thread(saved, gateway.settings, path.model, await gateway.store.saves(path.model))
    source = next((one for one in everything if one.path == path.stored), None)
    if source is None:
        raise UnknownVersion(f"there is no {path}", remedy=_MISSING, field="source_path")

    key, now = request.headers.get("x-idempotency-key"), time.time()
    session = copy_session_id(owner, key) if key else new_session_id()
    copy = TinkerPath(model_id(session, 0), path.kind, path.name)
    if await gateway.store.session(session) is None:
        record = SessionRecord(owner=owner, created=now, project=project, user_metadata={"copied_from": str(path)})
        await gateway.store.put_session(session, record, living=False)
    await gateway.store.put_model(copy.model, _run(run, owner, now, path))
    if copy.stored.checkpoint_id not in await gateway.store.saves(copy.model):
        said = SaveRecord(
            seq=source.record.seq if source.record else -1,
            at=now,
            expires_at=None if seconds is None else now + seconds,
            user_metadata=source.record.user_metadata if source.record and run.owner == owner else None,
        )
        await gateway.store.put_saves(copy.model, copy.stored.checkpoint_id, [said])
    places = (gateway.settings.folder(one.kind, one.place) for one in (path, copy))
    try:
        await asyncio.to_thread(link_folder, *places)
    except FileNotFoundError:
        raise UnknownVersion(f"{path} was deleted meanwhile", remedy=_MISSING, field="source_path") from None
    return json_response({"tinker_path": str(copy)})


def refuse_token(token: object) -> None:
    """Raises InvalidInput when a client sent a token for another's weights: this service gives out none."""
    if token:
        raise InvalidInput(
            "this service gives out no access tokens for weights",
            remedy="Have their owner publish the checkpoint: `tinker checkpoint publish PATH`.",
            field="weights_access_token",
        )


def life_of(seconds: int | None) -> int | None:
    """A time to live; None: for ever. Raises InvalidInput."""
    if seconds is not None and not 1 <= seconds <= LONGEST_LIFE:
        raise InvalidInput(
            f"{seconds} is not a time to live", remedy=f"Send 1 to {LONGEST_LIFE}, or null.", field="ttl_seconds"
        )
    return seconds


def link_folder(source: Path, target: Path) -> None:
    """Make `target` a copy of `source` that shares its files where the file system can; one that is there stays.

    Raises FileNotFoundError when the source is gone.
    """
    if target.is_dir():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{new_id()}")
    try:
        shutil.copytree(source, fresh, copy_function=_link)
        os.utime(fresh)  # It is as old as the copy, not as its source.
        _flush(fresh)
        os.rename(fresh, target)
        _flush(target.parent)
    except shutil.Error as error:
        raise FileNotFoundError(str(error)) from error
    except OSError:
        # Another replica carried out the same request first.
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _link(source: str, target: str, copy: Callable[[str, str], object] = shutil.copy2) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        copy(source, target)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _run(source: ModelRecord, owner: str, now: float, path: TinkerPath) -> ModelRecord:
    """The training run of a copy: what its source was, without what others said of it."""
    return source.model_copy(update={"owner": owner, "created": now, "user_metadata": {"copied_from": str(path)}})

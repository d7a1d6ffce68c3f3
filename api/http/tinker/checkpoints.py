"""Tinker API: training runs and checkpoints, for RestClient and the command line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from tinsmith.api.http.fields import field, maybe
from tinsmith.api.http.gateway import Gateway
from tinsmith.api.http.responses import json_response, read_object
from tinsmith.api.http.retention.catalog import Saved, remove, run_as_json, saved
from tinsmith.api.http.tenancy.names import TinkerPath, parse_path, session_of
from tinsmith.api.http.tenancy.records import ModelRecord, SaveRecord
from tinsmith.api.http.tinker.copies import life_of
from tinsmith.api.http.tinker.session_listing import window_of
from tinsmith.api.http.tinker.startup import gateway_of
from tinsmith.bus.protocol.errors import UnknownVersion

router = APIRouter(prefix="/api/v1")

CHECKPOINT = "/training_runs/{model}/checkpoints/{kind}/{name}"


@router.get("/training_runs")
async def training_runs(request: Request, limit: int = 20, offset: int = 0, project_id: str | None = None) -> Response:
    """The caller's, newest first; or those of one project."""
    gateway, owner = gateway_of(request), gateway_of(request).owner(request)
    window = window_of(limit, offset)
    mine = await _models_of(gateway, owner)
    if project_id is not None:
        projects = {session: await gateway.store.project(session) for session in {session_of(it) for it, _ in mine}}
        mine = [(model, record) for model, record in mine if projects[session_of(model)] == project_id]
    runs = [await _run(gateway, model, record) for model, record in mine[window]]
    cursor = {"offset": offset, "limit": limit, "total_count": len(mine)}
    return json_response({"training_runs": runs, "cursor": cursor})


@router.get("/training_runs/{model}")
async def training_run(request: Request, model: str) -> Response:
    """One of the caller's."""
    gateway = gateway_of(request)
    return json_response(await _run(gateway, model, await gateway.model(request, model)))


@router.get("/training_runs/{model}/checkpoints")
async def checkpoints_of_run(request: Request, model: str) -> Response:
    """Of one training run, oldest first."""
    gateway = gateway_of(request)
    await gateway.model(request, model)
    return json_response({"checkpoints": [_as_json(one) for one in await _saved(gateway, model)]})


@router.get("/checkpoints")
async def checkpoints(request: Request, limit: int = 100, offset: int = 0) -> Response:
    """Of all the caller's training runs, newest first."""
    gateway, owner = gateway_of(request), gateway_of(request).owner(request)
    window = window_of(limit, offset)
    found = [one for model, _ in await _models_of(gateway, owner) for one in await _saved(gateway, model)]
    found.sort(key=lambda one: -one.at)
    page = [_as_json(one) for one in found[window]]
    return json_response({"checkpoints": page, "cursor": {"offset": offset, "limit": limit, "total_count": len(found)}})


@router.delete(CHECKPOINT)
async def delete_checkpoint(request: Request, model: str, kind: str, name: str) -> Response:
    """Gone for good, files and all."""
    gateway = gateway_of(request)
    path = (await own_checkpoint(request, model, kind, name)).stored
    await asyncio.to_thread(remove, gateway.settings, path)
    await gateway.store.put_saves(model, path.checkpoint_id, [])
    return json_response({})


@router.post(CHECKPOINT + "/publish")
async def publish(request: Request, model: str, kind: str, name: str) -> Response:
    """Let any tenant load it."""
    await _amend(request, model, kind, name, public=True)
    return json_response({})


@router.delete(CHECKPOINT + "/publish")
async def unpublish(request: Request, model: str, kind: str, name: str) -> Response:
    """Keep it to its owner again."""
    await _amend(request, model, kind, name, public=False)
    return json_response({})


@router.put(CHECKPOINT + "/ttl")
async def set_ttl(request: Request, model: str, kind: str, name: str) -> Response:
    """Delete it so many seconds from now; null: never."""
    seconds = life_of(maybe(await read_object(request), "ttl_seconds", int))
    await _amend(request, model, kind, name, expires_at=None if seconds is None else time.time() + seconds)
    return json_response({})


@router.post("/weights_info")
async def weights_info(request: Request) -> Response:
    """What kind of model a checkpoint is of."""
    gateway, body = gateway_of(request), await read_object(request)
    path = parse_path(field(body, "tinker_path", str))
    record = await gateway.readable(request, path.stored)
    if await _find(gateway, path) is None:
        raise UnknownVersion(f"there is no {path}", remedy="Use a path that a save returned.")
    lora = record.lora
    return json_response(
        {
            "base_model": record.base,
            "is_lora": True,
            "lora_rank": lora.rank,
            "train_attn": lora.attn,
            "train_mlp": lora.mlp,
            "train_unembed": lora.unembed,
            "optimizer_config": {"type": "adamw"},
        }
    )


async def _models_of(gateway: Gateway, owner: str) -> Sequence[tuple[str, ModelRecord]]:
    found = []
    for model in await gateway.store.models():
        record = await gateway.store.model(model)
        if record is not None and record.owner == owner:
            found.append((model, record))
    return found


async def _saved(gateway: Gateway, model: str) -> list[Saved]:
    return await asyncio.to_thread(saved, gateway.settings, model, await gateway.store.saves(model))


async def _find(gateway: Gateway, path: TinkerPath) -> Saved | None:
    return next((one for one in await _saved(gateway, path.model) if one.path == path.stored), None)


def _as_json(one: Saved) -> dict[str, Any]:
    """A Checkpoint of the Tinker API; external weights under the path that their client knows."""
    shown = one.path.shown
    if shown == one.path:
        return one.as_json()
    names = {"checkpoint_id": shown.checkpoint_id, "checkpoint_type": "external", "tinker_path": str(shown)}
    return {**one.as_json(), **names}


async def _run(gateway: Gateway, model: str, record: ModelRecord) -> dict[str, Any]:
    seen = await gateway.store.last_seen(session_of(model))
    everything = await _saved(gateway, model)
    last = max([record.created, *(one.at for one in everything)])
    listed = [one for one in everything if one.path.shown == one.path]
    return run_as_json(model, record, last if seen is None else max(last, seen), listed)


async def own_checkpoint(request: Request, model: str, kind: str, name: str) -> TinkerPath:
    """A checkpoint of the caller's that exists. Raises UnknownModel, UnknownVersion, InvalidInput."""
    gateway = gateway_of(request)
    await gateway.model(request, model)
    path = parse_path(f"tinker://{model}/{kind}/{name}")
    if await _find(gateway, path) is None:
        raise UnknownVersion(f"there is no {path}", remedy="List the checkpoints of the training run.")
    return path


async def _amend(request: Request, model: str, kind: str, name: str, **changes: Any) -> None:
    """Change what is known of a checkpoint, whichever of its saves it is from."""
    gateway = gateway_of(request)
    path = (await own_checkpoint(request, model, kind, name)).stored
    records = (await gateway.store.saves(model)).get(path.checkpoint_id) or [SaveRecord(seq=-1, at=time.time())]
    await gateway.store.put_saves(model, path.checkpoint_id, [one.model_copy(update=changes) for one in records])

"""Tinker API: trained weights to download, as a PEFT adapter or a plain checkpoint that other programs load."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from starlette.responses import FileResponse

from tinsmith.api.http.responses import HttpError, json_response
from tinsmith.api.http.retention.catalog import iso
from tinsmith.api.http.tenancy.names import TinkerPath
from tinsmith.api.http.tenancy.signed import expiry, is_signed, signature
from tinsmith.api.http.tinker.checkpoints import own_checkpoint
from tinsmith.api.http.tinker.startup import gateway_of
from tinsmith.bus.protocol.errors import UnknownVersion

router = APIRouter(prefix="/api/v1")


@router.get("/training_runs/{model}/checkpoints/external_weights/{name}/external_weights_urls")
async def external_weights_urls(request: Request, model: str, name: str) -> Response:
    """An address for each file of external weights of the caller's."""
    gateway = gateway_of(request)
    path = await own_checkpoint(request, model, "external_weights", name)
    expires, secret = expiry(), await gateway.store.secret()
    files = await asyncio.to_thread(_files, gateway.settings.folder(path.kind, path.place))
    urls = {}
    for file in files:
        place = f"{quote(model)}/{quote(name)}/{quote(file)}"
        sign = signature(secret, f"{path}/{file}", expires)
        urls[file] = f"{request.base_url}api/v1/external_weights/{place}?expires={expires}&signature={sign}"
    return json_response({"urls": urls, "expires": iso(expires)})


@router.get("/external_weights/{model}/{name}/{file:path}")
async def external_file(
    request: Request, model: str, name: str, file: str, expires: int = 0, signature: str = ""
) -> Response:
    """One file, for whoever has its address."""
    gateway = gateway_of(request)
    path = TinkerPath(model, "external_weights", name)
    if not is_signed(await gateway.store.secret(), f"{path}/{file}", expires, signature):
        raise HttpError(403, "this address is not valid, or no longer; ask for a new one")
    folder = gateway.settings.folder(path.kind, path.place)
    if file not in await asyncio.to_thread(_files, folder):
        raise UnknownVersion(f"there is no file {file!r} of {path}", remedy="It was deleted; save it again.")
    return FileResponse(folder / file, media_type="application/octet-stream")


def _files(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())

"""The ASGI application of one replica."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.routing import Route

from tinsmith.api.http.errors import answer_http_error, answer_typed_error
from tinsmith.api.http.gateway import Gateway
from tinsmith.api.http.native import routes as native
from tinsmith.api.http.openai import routes as openai
from tinsmith.api.http.operations import health
from tinsmith.api.http.responses import HttpError
from tinsmith.api.http.retention.sweeper import sweep_for_ever
from tinsmith.api.http.settings import HttpSettings
from tinsmith.api.http.tinker import (
    checkpoints,
    copies,
    downloads,
    futures,
    refused,
    samples,
    session_listing,
    startup,
    trace,
    training,
)
from tinsmith.bus.protocol.errors import TinsmithError

log = logging.getLogger("tinsmith.http")

HOT = {
    "session_heartbeat": startup.session_heartbeat,
    "asample": samples.asample,
    "retrieve_future": futures.retrieve_future,
    "retrieve_futures": futures.retrieve_futures,
    "forward_backward": training.forward_backward,
    "optim_step": training.optim_step,
}
"""What clients send by the hundred comes before everything else, and without FastAPI's layers, which these have no use
for: to find one among all the others takes longer than to answer it."""


def make_app(settings: HttpSettings) -> FastAPI:
    """All endpoints over one bus, which is opened when the application starts up."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.gateway = await Gateway.open(settings)
        sweeping = asyncio.create_task(sweep_for_ever(app.state.gateway))
        sweeping.add_done_callback(_ended)
        try:
            yield
        finally:
            sweeping.cancel()
            await app.state.gateway.close()

    app = FastAPI(title="Tinsmith", lifespan=lifespan, openapi_url=None)
    tinker = (startup, training, futures, samples, session_listing, trace, copies, checkpoints, downloads, refused)
    for part in (*tinker, native, openai, health):
        app.include_router(part.router)
    for name, endpoint in HOT.items():
        app.router.routes.insert(0, Route(f"/api/v1/{name}", endpoint, methods=["POST"]))
    app.add_exception_handler(HttpError, answer_http_error)
    app.add_exception_handler(TinsmithError, answer_typed_error)
    return app


def _ended(sweeping: asyncio.Task[None]) -> None:
    if not sweeping.cancelled():
        # The bus came back without its data, or a fault of ours: a fresh replica opens it anew.
        log.critical("this replica can't go on", exc_info=sweeping.exception())
        os._exit(1)

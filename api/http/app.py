"""The ASGI application of one replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from tinsmith.api.http.door import Door
from tinsmith.api.http.errors import answer_http_error, answer_typed_error
from tinsmith.api.http.responses import HttpError
from tinsmith.api.http.routes import futures, health, native, rest, sampling, session, training
from tinsmith.api.http.settings import HttpSettings
from tinsmith.api.http.sweeper import sweep_for_ever
from tinsmith.bus.errors import TinsmithError


def make_app(settings: HttpSettings) -> FastAPI:
    """All endpoints over one bus, which is opened when the application starts up."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.door = await Door.open(settings)
        sweeping = asyncio.create_task(sweep_for_ever(app.state.door))
        try:
            yield
        finally:
            sweeping.cancel()
            await app.state.door.close()

    app = FastAPI(title="Tinsmith", lifespan=lifespan, openapi_url=None)
    for part in (session, training, futures, sampling, rest, native, health):
        app.include_router(part.router)
    app.add_exception_handler(HttpError, answer_http_error)
    app.add_exception_handler(TinsmithError, answer_typed_error)
    return app

"""The chores of the HTTP gateway: sessions that fell silent are ended, checkpoints and versions whose time is over are
deleted, and so is what nothing holds any more (leftovers.py).

Any replica may do them, and two at once when one takes long: each step may be repeated.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from tinsmith.api.http.gateway import Gateway
from tinsmith.api.http.retention.catalog import has_saves, look, remove, remove_unnamed
from tinsmith.api.http.retention.leftovers import collect
from tinsmith.api.http.tenancy.names import PathKind, TinkerPath, is_session_model, session_of, unload_id
from tinsmith.bus.protocol.envelope import Command, Kind
from tinsmith.bus.protocol.errors import BusError, BusLost, InvalidInput

log = logging.getLogger("tinsmith.http")

SWEEP_SECONDS = 10
COLLECT_SECONDS = 600
"""How often the whole state folder is looked through."""
RUN_SECONDS = 7 * 86400
"""How long a training run without checkpoints is listed after its session is over."""


async def sweep_for_ever(gateway: Gateway) -> None:
    """Sweep now and then; a bus that can't be reached, or a disk that fails, only delays it."""
    while True:
        try:
            if await gateway.store.claim("sweep", SWEEP_SECONDS - 1):
                await sweep(gateway, time.time())
            if await gateway.store.claim("collect", COLLECT_SECONDS - 1):
                await collect(gateway, time.time())
        except BusLost:
            raise
        except (BusError, OSError) as error:
            log.warning("chores were put off: %s", error)
        except Exception:
            # One record that can't be dealt with must not take the gateway down with it.
            log.exception("chores were not done")
        await asyncio.sleep(SWEEP_SECONDS)


async def sweep(gateway: Gateway, now: float) -> None:
    """Do what is due at `now` (Unix seconds)."""
    settings = gateway.settings
    # While no gateway was open nobody could be heard: after a restart every client gets its time anew.
    if now - gateway.opened >= settings.session_seconds:
        for session in await gateway.store.silent(now - settings.session_seconds, now - settings.finished_seconds):
            with _alone(f"session {session}"):
                await end_session(gateway, session)
    for model in await gateway.store.models():
        with _alone(f"model {model}"):
            await _expire(gateway, model, now)


@contextmanager
def _alone(what: str) -> Iterator[None]:
    """What can't be done for one is tried again at the next sweep, and does not hold up the others."""
    try:
        yield
    except BusLost:
        raise
    except (BusError, OSError) as error:
        log.warning("%s was put off: %s", what, error)


async def end_session(gateway: Gateway, session: str) -> None:
    """Unload its models, forget it, delete the versions that only its own samplers used.

    Versions go last: a crash before leaves them to be found as leftovers.
    """
    models = await gateway.store.models(session)
    for model in models:
        command = Command(id=unload_id(model), model=model, kind=Kind.UNLOAD, seq=-1)
        try:
            await gateway.bus.submit(command)
        except InvalidInput as error:
            log.info("%s was unloaded before: %s", model, error)
    await gateway.store.end_session(session)
    held = await gateway.store.sampled()
    for model in models:
        await asyncio.to_thread(remove_unnamed, gateway.settings, model, held)


async def _expire(gateway: Gateway, model: str, now: float) -> None:
    for checkpoint_id, records in (await gateway.store.saves(model)).items():
        if not any(record.expires_at is not None and record.expires_at <= now for record in records):
            continue
        kind, _, name = checkpoint_id.partition("/")
        path = TinkerPath(model, cast(PathKind, kind), name)
        one = await asyncio.to_thread(look, gateway.settings, path, records)
        if one is None:
            # It went with its session, or is still to be written: then it needs what was said of it.
            over = all(record.at < now - RUN_SECONDS for record in records)
        else:
            over = one.record is not None and one.record.expires_at is not None and one.record.expires_at <= now
            if over:
                await asyncio.to_thread(remove, gateway.settings, path)
        if over:
            await gateway.store.put_saves(model, checkpoint_id, [])
    record = await gateway.store.model(model)
    if record is None or record.created >= now - RUN_SECONDS or not is_session_model(model):
        return
    over = await gateway.store.last_seen(session_of(model)) is None
    if over and not await asyncio.to_thread(has_saves, gateway.settings, model):
        await gateway.store.drop_model(model)

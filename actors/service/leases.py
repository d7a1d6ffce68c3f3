"""The models that this coordinator owns: one lease and one epoch each, renewed well before they run out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tinsmith.bus.bus import Bus
from tinsmith.bus.protocol.errors import Fenced, LeaseHeld

log = logging.getLogger("tinsmith.leases")


class Leases:
    """Leases under one owner's name."""

    def __init__(self, bus: Bus, owner: str, lease_ms: int) -> None:
        self._bus = bus
        self._owner = owner
        self._lease_ms = lease_ms
        self._epochs: dict[str, int] = {}
        self.on_lost: Callable[[str], None] = lambda model: None

    async def own(self, model: str) -> int:
        """The epoch in which this owner holds the model; waits while another's lease runs."""
        while True:
            try:
                self._epochs[model] = await self._bus.own(model, self._owner, self._lease_ms)
                return self._epochs[model]
            except LeaseHeld:
                # The lease can be released early, so look more often than once per lease.
                await asyncio.sleep(self._lease_ms / 10_000)

    def forget(self, model: str) -> None:
        """Do not renew this model any more."""
        self._epochs.pop(model, None)

    async def renew_for_ever(self) -> None:
        """Renew all leases three times per lease; a lost one is reported and forgotten."""
        while True:
            await asyncio.sleep(self._lease_ms / 3000)
            try:
                await self._bus.renew(list(self._epochs), self._owner, self._epochs, self._lease_ms)
            except Fenced as error:
                # The others were renewed; should more be lost, the next round tells.
                log.warning("%s", error)
                if error.model is not None:
                    self.forget(error.model)
                    self.on_lost(error.model)

    async def release(self) -> None:
        """Give every model back, so that a successor need not wait."""
        for model, epoch in list(self._epochs.items()):
            try:
                await self._bus.release(model, self._owner, epoch)
            except Fenced:
                log.warning("%s had another owner already", model)
        self._epochs.clear()

"""The start-up self-test refuses a server on which the promises do not hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinsmith.bus.bus import Info
from tinsmith.bus.connection import open_bus
from tinsmith.bus.protocol.errors import BusUnreachable, UnsafeServer
from tinsmith.bus.redis.embedded import EmbeddedServer
from tinsmith.bus.selftest import _check, self_test


async def test_a_good_server_passes_and_is_left_clean(own_server: EmbeddedServer, tmp_path: Path) -> None:
    url = own_server.start(tmp_path)
    info = await self_test(url)
    assert info.eviction == "noeviction"
    assert info.appendonly
    async with await open_bus(url) as bus:
        (size,) = await bus.session.call(("DBSIZE",))
        assert size == 2


async def test_a_server_that_evicts_is_refused_by_name_and_remedy(own_server: EmbeddedServer, tmp_path: Path) -> None:
    url = own_server.start(tmp_path)
    async with await open_bus(url) as bus:
        await bus.session.call(("CONFIG", "SET", "maxmemory-policy", "allkeys-lru"))
    with pytest.raises(UnsafeServer, match=r"allkeys-lru.*CONFIG SET maxmemory-policy noeviction"):
        await self_test(url)


async def test_no_server_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(BusUnreachable):
        await self_test(f"unix://{tmp_path}/absent.sock", connect_seconds=0.1)


@pytest.mark.parametrize(("version", "good"), [("5.0.14", False), ("6.0.20", False), ("6.2.0", True), ("10.0.0", True)])
def test_old_servers_are_refused(version: str, good: bool) -> None:
    info = Info("redis", version, version, "noeviction", True, "always", 0, 0, "")
    if good:
        _check(info)
    else:
        with pytest.raises(UnsafeServer, match="too old"):
            _check(info)

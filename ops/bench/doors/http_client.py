"""A plain HTTP client of the Tinker API, for what the SDK is too slow to measure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from tinsmith.bus.protocol.errors import TinsmithError

PROMPT = [1, 5, 9, 12]


class RawClient:
    """So many connections to one service, as one tenant. Use as an async context manager."""

    def __init__(self, address: str, connections: int) -> None:
        self._http = aiohttp.ClientSession(
            f"{address}/api/v1/",
            connector=aiohttp.TCPConnector(limit=connections),
            headers={"X-API-Key": "tml-plain"},
            timeout=aiohttp.ClientTimeout(total=120),
        )

    async def __aenter__(self) -> RawClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer's JSON. Raises TinsmithError for any status but 2xx."""
        async with self._http.post(path, json=body) as response:
            if not response.ok:
                raise TinsmithError(f"{path} gave {response.status}: {(await response.text())[:300]}")
            return await response.json()

    async def timed(self, path: str, body: dict[str, Any]) -> float:
        """Seconds to the answer."""
        begun = time.perf_counter()
        await self.post(path, body)
        return time.perf_counter() - begun

    async def all(self, path: str, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        """The answers to many requests, as many at once as there are connections."""
        return await asyncio.gather(*(self.post(path, body) for body in bodies))

    async def session(self) -> str:
        """A fresh session."""
        made = await self.post("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0"})
        return str(made["session_id"])

    async def model(self, base: str) -> str:
        """A fresh model, ready to train."""
        body = {"session_id": await self.session(), "model_seq_id": 0, "base_model": base, "lora_config": {"rank": 4}}
        made = await self.post("create_model", body)
        await self.result(made)
        return str(made["model_id"])

    async def sampler(self, base: str) -> str:
        """A sampling session over the base."""
        body = {"session_id": await self.session(), "sampling_session_seq_id": 0, "base_model": base}
        return str((await self.post("create_sampling_session", body))["sampling_session_id"])

    async def result(self, future: dict[str, Any]) -> Any:
        """What became of a request. Raises TinsmithError when it failed."""
        found = await self.post("retrieve_future", {"request_id": future["request_id"]})
        if "error" in found:
            raise TinsmithError(f"{future['request_id']} failed: {found['error']}")
        return found


def step_body(model: str, seq: int) -> dict[str, Any]:
    """An optim_step."""
    return {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 1e-4}}


def sample_body(sampler: str, seq: int, tokens: int) -> dict[str, Any]:
    """A sample that is exactly so long."""
    return {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        "sampling_params": {"max_tokens": tokens, "stop": []},
    }

"""Sampling clients of the official SDK: in other processes, and by either way of waiting for results."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from gateway_app import Running, running
from tinker import types

from tinsmith.api.http.settings import HttpSettings
from tinsmith.bus.connection import open_bus
from tinsmith.bus.events import Streamed
from tinsmith.bus.protocol.envelope import SAMPLE_LANE

PROMPT = types.ModelInput.from_ints([1, 2, 3, 4])


def test_a_sampling_client_goes_to_another_process_and_gets_a_number_of_its_own(
    app: Running, sdk: tinker.ServiceClient
) -> None:
    sampler = sdk.create_sampling_client(base_model="tiny").result()
    program = (
        "import os, pickle, sys, tinker\n"
        "client = pickle.load(sys.stdin.buffer)\n"
        "prompt = tinker.types.ModelInput.from_ints([1, 2, 3, 4])\n"
        "print(client.compute_logprobs(prompt).result(), client._cloned_sampler_id, flush=True)\n"
        "os._exit(0)"
    )
    environment = {**os.environ, "TINKER_TELEMETRY": "0"}
    said = [
        subprocess.run(
            [sys.executable, "-c", program],
            input=pickle.dumps(sampler),
            env=environment,
            capture_output=True,
            timeout=90,
        )
        for _ in range(2)
    ]
    own = sampler.compute_logprobs(PROMPT).result()
    assert [one.stdout.decode() for one in said] == [f"{own} 1\n", f"{own} 2\n"], said[0].stderr.decode()[-2000:]
    handle = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key="tml-one")
    assert handle.compute_logprobs(PROMPT).result() == own
    answer = httpx.post(f"{app.url}/api/v1/join_sampling_session", json={"sampling_session_id": "s-none:sample:0"})
    assert answer.status_code == 404


@pytest.mark.parametrize("together", [True, False])
def test_results_come_by_one_request_for_all_or_by_one_each(settings: HttpSettings, together: bool) -> None:
    asked: list[str] = []

    def around(app: Any) -> Any:
        async def watched(scope: dict[str, Any], receive: Any, send: Any) -> None:
            asked.append(scope.get("path", ""))
            await app(scope, receive, send)

        return watched

    with running(settings, around) as app, tinker.ServiceClient(base_url=app.url, api_key="tml-one") as client:
        sampler = client.create_sampling_client(base_model="tiny").result()
        config = client.holder._client_config
        assert config.sample_use_retrieve_futures
        client.holder._client_config = config.model_copy(update={"sample_use_retrieve_futures": together})
        params = types.SamplingParams(max_tokens=3, temperature=0.0, stop=[])
        futures = [sampler.sample(PROMPT, num_samples=1, sampling_params=params) for _ in range(8)]
        tokens = [list(future.result().sequences[0].tokens) for future in futures]
    assert tokens == [tokens[0]] * 8
    assert ("/api/v1/retrieve_futures" in asked) == together
    assert "/api/v1/retrieve_future" in asked


def test_a_block_that_fails_is_finished_as_that(app: Running) -> None:
    rest = tinker.RestClient(base_url=app.url, api_key="tml-block")

    def use(failure: Exception | None) -> None:
        with tinker.ServiceClient(base_url=app.url, api_key="tml-block") as client:
            client.create_sampling_client(base_model="tiny").result()
            if failure is not None:
                raise failure

    use(None)
    with pytest.raises(ValueError, match="the user's own"):
        use(ValueError("the user's own"))
    with pytest.warns(tinker.ExperimentalWarning):
        found = rest.search_sessions(types.SessionSearchRequest()).result().sessions
    statuses = [one.status for one in found]
    assert [getattr(status, "reason", None) and status.reason.type for status in statuses] == ["errored", "success"]


def test_alternatives_drawn_for_the_prompt_are_the_models_own(sdk: tinker.ServiceClient) -> None:
    sampler = sdk.create_sampling_client(base_model="tiny").result()
    params = types.SamplingParams(max_tokens=1, seed=4, temperature=0.7)
    asked: dict[str, Any] = {"include_prompt_logprobs": True, "prompt_alt_tokens_k": 5}
    first, again = (sampler.sample(PROMPT, 1, params, **asked).result().prompt_alt_tokens for _ in range(2))
    assert first is not None
    assert again is not None
    tokens, logprobs = (np.reshape(it.data, it.shape) for it in (first.tokens, first.logprobs))
    assert tokens.shape == logprobs.shape == (3, 5)
    assert first.tokens.data == again.tokens.data
    for at, row in enumerate(tokens.tolist()):
        other = types.ModelInput.from_ints([*[1, 2, 3, 4][: at + 1], row[0]])
        assert sampler.compute_logprobs(other).result()[-1] == pytest.approx(logprobs[at, 0], abs=1e-4)


def test_a_sample_that_the_client_gives_up_is_stopped(sdk: tinker.ServiceClient, settings: HttpSettings) -> None:
    sampler = sdk.create_sampling_client(base_model="tiny").result()
    # As many as take the sampler thousands of steps.
    params = types.SamplingParams(max_tokens=240, stop=[])
    given_up = sampler.sample(PROMPT, 256, params)
    with pytest.raises(TimeoutError):
        given_up.result(timeout=1)  # By now it is at the service.
    assert given_up.future().cancel()

    async def end() -> dict[str, Any] | None:
        async with await open_bus(settings.bus_url, settings.bus) as bus, asyncio.timeout(60):
            async for seen in bus.events([SAMPLE_LANE], "0"):
                if isinstance(seen, Streamed) and seen.event.id.startswith(str(sampler._sampling_session_id)):
                    return seen.event.error
        return None

    error = asyncio.run(end())
    assert error is not None
    assert error["code"] == "cancelled"

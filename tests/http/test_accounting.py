"""What a user may ask of a running service: what its disk and its bus hold, and its checkpoints to take along."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from gateway_app import Running
from serving import Service, run_cli

from tinsmith.api import Datum, connect
from tinsmith.api.http.retention.catalog import remove
from tinsmith.api.http.tenancy.names import TinkerPath
from tinsmith.bus.protocol.errors import UnknownVersion


def test_health_metrics_and_status_tell_what_the_state_takes(app: Running, service: Service) -> None:
    http = app.http()
    deadline = time.monotonic() + 60
    while not (disk := http.get("/health").json()["disk"]):
        assert time.monotonic() < deadline
    assert disk.keys() == {"checkpoints_bytes", "versions_bytes", "snapshots_bytes", "free_bytes", "at"}
    assert disk["free_bytes"] > 0
    assert "\ntinsmith_disk_free_bytes " in http.get("/metrics").text
    told = run_cli("status", "--url", str(service.state)).stdout
    assert "disk:\n" in told
    assert "  free_bytes: " in told


async def test_keys_lists_the_bus_model_by_model(service: Service) -> None:
    async with connect(str(service.state)) as client:
        model = await client.create_model("tiny", lora_rank=2, name="listed")
        done = run_cli("keys", "--url", str(service.state))
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        start = lines.index(next(line for line in lines if line.startswith("model listed: ")))
        assert [line.split()[0] for line in lines[start + 1 : start + 4]] == [
            f"m:listed:{part}" for part in ("cmd", "evt", "meta")
        ]
        assert lines[0].startswith("the bus: ")
        assert any(line.endswith("string: version of this protocol") for line in lines)
        assert not any("not of this release" in line for line in lines), done.stdout
        await model.unload()


async def test_a_published_version_is_exported_while_the_service_runs_and_deleted_for_good(
    app: Running, service: Service, tiny_model: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    async with connect(str(service.state)) as client:
        model = await client.create_model("tiny", lora_rank=4, name="exported")
        model.forward_backward([Datum([1, 5, 9], {"target_tokens": [5, 9, 2]})], "cross_entropy")
        model.optim_step(lr=1e-2)
        version = await model.publish("v1")
        prompt = [1, 5, 9, 7]
        sampled = await client.sample(prompt, version=version, max_tokens=1, prompt_logprobs=True)
        for source in ("exported/v1", "tinker://exported/sampler_weights/v1"):
            to = tmp_path / source.rpartition("/")[0].replace("/", "-")
            asked = ["--state", str(service.state), "--model", str(tiny_model), "--to", str(to), "--format", "hf"]
            done = run_cli("export", source, *asked)
            assert done.returncode == 0, done.stderr
            with torch.no_grad():
                logits = AutoModelForCausalLM.from_pretrained(to)(input_ids=torch.tensor([prompt])).logits[0, :-1]
            expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
            np.testing.assert_allclose(sampled.prompt_logprobs[1:], expected, atol=1e-5)
        assert json.loads((to / "config.json").read_text())["model_type"] == "llama"

        assert remove(app.settings, TinkerPath("exported", "sampler_weights", "v1"))
        with pytest.raises(UnknownVersion, match="exported/v1"):
            await client.sample(prompt, version=version, max_tokens=1)
        await model.unload()

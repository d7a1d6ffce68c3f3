"""What the `tinker` program prints and changes, run as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
from bench import KEY
from commands import run
from gateway_app import Running, running, settings_of
from serving import Service

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def app(service: Service, tiny_model: Path) -> Iterator[Running]:
    with running(settings_of(service, tiny_model)) as it:
        yield it


def test_runs_and_checkpoints_are_listed_changed_downloaded_and_deleted(app: Running, tmp_path: Path) -> None:
    def said(command: str) -> Any:
        done = run(app.url, f"-f json {command}", tmp_path)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout) if done.stdout.strip() else None

    with tinker.ServiceClient(base_url=app.url, api_key=KEY) as client:
        model = client.create_lora_training_client("tiny", rank=2).result()
        path = model.save_state("one").result().path
        version = model.save_weights_for_sampler("one").result().path

    def info() -> dict[str, Any]:
        listed = said(f"checkpoint list --run-id {model.model_id}")["checkpoints"]
        return {it["tinker_path"]: it for it in listed}

    assert run(app.url, "version", tmp_path).stdout.strip().endswith(tinker.__version__)
    assert [it["model_name"] for it in said("model list")["models"]] == ["local/tiny", "tiny"]
    assert model.model_id in json.dumps(said("run list"))
    assert said(f"run info {model.model_id}")["lora_rank"] == 2
    assert set(info()) == {path, version}
    assert path in json.dumps(said(f"checkpoint info {path}"))
    said(f"checkpoint publish {path}")
    said(f"checkpoint set-ttl {path} --ttl 86400")
    assert (info()[path]["public"], info()[path]["expires_at"] is None) == (True, False)
    said(f"checkpoint unpublish {path}")
    said(f"checkpoint set-ttl {path} --remove")
    assert (info()[path]["public"], info()[path]["expires_at"]) == (False, None)
    said(f"checkpoint download {path}")
    (folder,) = (it for it in tmp_path.iterdir() if it.name.endswith("_weights_one"))
    adapter = app.settings.folder("sampler_weights", f"{model.model_id}/one") / "adapter_model.safetensors"
    assert (folder / "adapter_model.safetensors").read_bytes() == adapter.read_bytes()
    said(f"checkpoint delete {path} --yes")
    assert set(info()) == {version}
    assert "there is no" in json.dumps(said(f"checkpoint delete {path} --yes"))
    said(f"session export-trace {model.model_id.partition(':')[0]} --output trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

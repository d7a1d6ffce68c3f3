"""Programs that others wrote for the Tinker API run unchanged against the HTTP door."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hub import ALIASES, make_hub, make_tokenizer
from serving import Service, processes_of, start_service
from test_readme import curl_session

pytestmark = pytest.mark.timeout(600)


@dataclass
class Gateway:
    """A service with its HTTP door open, and the folder in which the programs run."""

    service: Service
    url: str
    hub: Path


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("clients")
    model = folder / "model"
    vocab = make_tokenizer(model)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).save_pretrained(model)
    make_hub(folder / "hub", model)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    names = [word for alias in ALIASES for word in ("--also-known-as", alias)]
    running = start_service(model, folder / "state", "--alias", "tiny", "--port", str(port), *names)
    yield Gateway(running, f"http://127.0.0.1:{port}", folder / "hub")
    running.stop()
    assert processes_of(running.state) == []


def run(door: Gateway, program: str, log: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run a program of the package to its end; the metrics that it logged, one mapping a step."""
    environment = {
        **os.environ,
        "TINKER_API_KEY": "tml-test",
        "TINKER_BASE_URL": door.url,
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(log.parent / "hf"),
    }
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{program}", f"model_name={ALIASES[0]}"]
    command += [f"base_url={door.url}", "lora_rank=8", f"log_path={log}", *arguments]
    done = subprocess.run(command, cwd=door.hub, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + door.service.tail()
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def test_the_supervised_loop_learns(door: Gateway, tmp_path: Path) -> None:
    steps = run(
        door,
        "sl_loop",
        tmp_path / "log",
        "batch_size=4",
        "max_steps=6",
        "save_every=2",
        "max_length=256",
        "learning_rate=1e-3",
    )
    losses = [step["train_mean_nll"] for step in steps if "train_mean_nll" in step]
    assert losses[-1] < losses[0]


def test_the_supervised_trainer_evaluates_and_keeps_rolling_checkpoints(door: Gateway, tmp_path: Path) -> None:
    import tinker_cookbook

    chats = Path(tinker_cookbook.__file__).parent / "example_data" / "conversations.jsonl"
    steps = run(
        door,
        "chat_sl.train",
        tmp_path / "log",
        f"dataset={chats}",
        "batch_size=4",
        "max_length=256",
        "max_steps=4",
        "save_every=2",
        "rolling_save_every=1",
        "rolling_ttl_seconds=3600",
        "eval_every=2",
        "behavior_if_log_dir_exists=delete",
    )
    assert any("train_mean_nll" in step for step in steps)
    checkpoints = (tmp_path / "log" / "checkpoints.jsonl").read_text().splitlines()
    assert len(checkpoints) >= 2


def test_the_rl_trainer_samples_from_the_weights_that_it_trains(door: Gateway, tmp_path: Path) -> None:
    steps = run(
        door,
        "math_rl.train",
        tmp_path / "log",
        "env=arithmetic",
        "groups_per_batch=4",
        "group_size=4",
        "max_tokens=5",
        "max_steps=3",
        "num_substeps=2",
        "save_every=2",
        "eval_every=0",
        "compute_post_kl=True",
        "loss_fn=importance_sampling",
        "behavior_if_log_dir_exists=delete",
    )
    assert steps[0]["optim/kl_sample_train_v1"] == pytest.approx(0.0, abs=1e-4)
    assert len(steps) >= 3


def test_the_curl_session_of_the_readme_trains_and_samples(door: Gateway) -> None:
    answers = [json.loads(line) for line in curl_session(door.url, "tiny")]
    assert [answer["event"]["ok"] for answer in answers] == [True] * 5
    assert answers[1]["event"]["metrics"]["num_tokens:sum"] == 3
    assert answers[2]["event"]["metrics"]["grad_norm"] > 0
    assert 1 <= len(answers[4]["arrays"]["tokens"][0]) <= 8

"""Fixtures for every test: the small random model and one running service."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("REDIS_URL", None)

from serving import Service, make_tiny_model, processes_of, start_service


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random two-layer Llama."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service of two ranks and one sampler for all tests that do not harm it."""
    running = start_service(tiny_model, tmp_path_factory.mktemp("service") / "state", "--alias", "tiny")
    yield running
    if running.process.poll() is None:
        running.stop()
    assert processes_of(running.state) == []

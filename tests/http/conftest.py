"""The HTTP door over the shared service: its application in a thread of this process, the real SDK before it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Service

sys.path.insert(0, str(Path(__file__).parent))
os.environ["TINKER_TELEMETRY"] = "0"

import tinker
from gateway_app import Running, running, settings_of

from tinsmith.api.http.settings import HttpSettings


@pytest.fixture(scope="session")
def settings(service: Service, tiny_model: Path) -> HttpSettings:
    """Of an application over the shared service."""
    return settings_of(service, tiny_model)


@pytest.fixture(scope="session")
def app(settings: HttpSettings) -> Iterator[Running]:
    """One application for all tests."""
    with running(settings) as it:
        yield it


@pytest.fixture(scope="session")
def sdk(app: Running) -> Iterator[tinker.ServiceClient]:
    """The official client, one session."""
    client = tinker.ServiceClient(base_url=app.url, api_key="tml-one", user_metadata={"run": "tests"})
    yield client
    client.close("success")

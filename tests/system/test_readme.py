"""What the README tells a user to type works as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from serving import Service

README = Path(__file__).parents[2] / "README.md"


def block(language: str, heading: str) -> str:
    """The first fenced block of that language under a heading."""
    section = README.read_text().split(f"## {heading}\n")[1]
    found = re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_async_door_of_the_readme_trains_and_samples(service: Service) -> None:
    program = block("python", "The async door").replace('"DIR"', repr(str(service.state))).replace("NAME", "tiny")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    loss, norm = map(float, done.stdout.splitlines()[0].split())
    assert loss > 0
    assert norm > 0


def curl_session(url: str, base: str) -> list[str]:
    """Run the README's session with curl; its answers, one a command."""
    done = subprocess.run(
        ["bash", "-euc", block("bash", "The HTTP door")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "URL": url, "BASE": base},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()

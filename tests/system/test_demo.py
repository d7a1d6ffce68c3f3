"""The demo, as the README tells a user to run it, on the small random model."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import run_cli


@pytest.mark.timeout(420)
def test_the_demo_raises_the_reward_and_draws_it(tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    done = run_cli("demo", "--model", "tiny", "--out", str(picture), timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = (
        float(line.split(":")[1]) for line in done.stdout.splitlines() if line.startswith("held-out reward ")
    )
    assert after > before
    assert picture.read_bytes().startswith(b"\x89PNG")

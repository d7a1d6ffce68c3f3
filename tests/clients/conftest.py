"""The HTTP door's application in this process, as the tests of that door run it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "http"))
os.environ["TINKER_TELEMETRY"] = "0"

"""A session's timeline in the Trace Event Format (JSON), which ui.perfetto.dev opens. Pure.

One row a model, and one for samples. A training command fills the time that it was with the ranks; a sample, whose
beginning no event tells, is a mark where it ended. Times are microseconds since 1970, by the bus server's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tinsmith.bus.events import Streamed
from tinsmith.bus.protocol.envelope import LANES
from tinsmith.bus.protocol.errors import Gap

PROCESS = 1


def timeline(session: str, items: Iterable[Streamed | Gap]) -> dict[str, Any] | None:
    """Of all that is kept of its models and of the samples that are its own; None when nothing is."""
    rows: dict[str, int] = {}
    marks: list[dict[str, Any]] = []
    missed = 0
    for item in items:
        if isinstance(item, Gap):
            # What a lane lacks may have been anybody's.
            missed += item.missed if item.model not in LANES else 0
        elif item.event.id.startswith(f"{session}:"):
            marks.append(_mark(item, rows.setdefault(item.model, len(rows) + 1)))
    if not marks:
        return None
    names = [_name("thread_name", row, "samples" if model in LANES else model) for model, row in rows.items()]
    title = f"session {session}" + (f" ({missed} earlier events are no longer kept)" if missed else "")
    return {"traceEvents": [_name("process_name", 0, title), *names, *marks], "displayTimeUnit": "ms"}


def _mark(item: Streamed, row: int) -> dict[str, Any]:
    event, end = item.event, item.at * 1e6
    run = event.timing.get("run")
    when: Mapping[str, Any] = {"ph": "i", "s": "t", "ts": end}
    if run is not None:
        when = {"ph": "X", "ts": end - run * 1e6, "dur": run * 1e6}
    facts = {"id": event.id, "seq": event.seq, "ok": event.ok, **{f"{name}_s": s for name, s in event.timing.items()}}
    if event.error is not None:
        facts["error"] = event.error
    return {"name": event.kind.value, "cat": event.kind.value, "pid": PROCESS, "tid": row, "args": facts, **when}


def _name(kind: str, row: int, text: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": PROCESS, "tid": row, "args": {"name": text}}

"""Every public method of the installed SDK and every command of its program is tried, and the table says what became
of it. A method that is new has no case here, and fails the test; a table that is no longer true fails it too."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
from bench import Asked, Bench, make_tokenizer, settle
from commands import COMMANDS, commands, run
from gateway_app import running, settings_of
from methods import ARGUMENTS, CASES, CLIENTS, public_methods
from serving import Service

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

TABLE = Path(__file__).parents[2] / "ops" / "docs" / "tinker_compatibility.md"
INTRO = f"""\
# What the official Tinker SDK finds here

`tests/clients/test_compatibility.py` wrote this by calling every public method of tinker {tinker.__version__},
every command of its program, and the arguments worth a line of their own, against a live service. *Works* means that
the call returned what the SDK asks for; what is refused raises the error that is shown, at once. A method and its
`_async` twin share a line. Endpoints are under `/api/v1`; what a client asks by itself (`/client/config`,
`/retrieve_future`, heartbeats) is left out.
"""
NOTES = {
    "ServiceClient.create_custom_loss": "the client computes the loss, between a `forward` and a `forward_backward`",
    "ServiceClient.get_console_url": "an address of the hosted service, which knows nothing of this one",
    "TrainingClient.get_console_url": "an address of the hosted service, which knows nothing of this one",
    "SamplingClient.get_tokenizer": "finds it by the base model's name: on the hub, or in a folder of that name",
    "TrainingClient.get_tokenizer": "reads it from the model's folder, when the client is on the same machine",
    "RestClient.export_session_trace": "a file in the JSON format that ui.perfetto.dev opens too",
    "session export-trace": "a file in the JSON format that ui.perfetto.dev opens too",
    "checkpoint push-hf": "wants an account at the hub before it asks for anything here",
}


@pytest.fixture(scope="module")
def asked() -> Asked:
    return Asked()


@pytest.fixture(scope="module")
def bench(service: Service, asked: Asked, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("compatibility")
    make_tokenizer(folder / "local" / "tiny")
    before = Path.cwd()
    os.chdir(folder)
    with running(settings_of(service, folder / "local" / "tiny"), asked.around) as app:
        made = Bench(app.url)
        yield made
        made.service.close("success").result()
    os.chdir(before)


def plain(text: str) -> str:
    """Without what differs from run to run."""
    text = re.sub(r"(s|x)-[0-9a-f]{16,32}(:[a-z]+:\d+)?(:\d+)?", "ID", text)
    text = re.sub(r" ?for self.request_id=.*", "", text)
    text = re.sub(r"Error code: (\d+) - \{'detail': ['\"](.*?)['\"], 'error'.*", r"\1: \2", text)
    text = re.sub(r"\x1b]8;;.*?\x1b\\(.*?)\x1b]8;;\x1b\\", r"\1", text)  # A link, as terminals show it.
    return text.replace("|", "\\|").strip()


def complaint(stderr: str) -> str:
    """What a command that failed says, on one line, without what it said before."""
    return plain(" ".join(stderr[stderr.rfind("Error: ") :].removeprefix("Error: ").splitlines()))


def outcome(call: Callable[[], Any]) -> str:
    """`works`, or the error that the user sees."""
    try:
        settle(call())
    except tinker.APIStatusError as error:
        detail = error.body.get("detail", "") if isinstance(error.body, dict) else str(error)
        return f"refused: `{type(error).__name__}` ({error.status_code}): {plain(detail)}"
    except Exception as error:
        return f"refused: `{type(error).__name__}`: {plain(str(error).splitlines()[0])}"
    return "works"


def row(name: str, endpoints: list[str], what: str, note: str = "") -> str:
    asked = "<br>".join(f"`{line}`" for line in endpoints) or "none"
    return f"| {name} | {asked} | {what}{f'; {note}' if note else ''} |"


def methods_of(client: type, bench: Bench, asked: Asked) -> Iterator[str]:
    """A row for each method; its twin's too where it fares otherwise."""
    for name in public_methods(client):
        twin = name.endswith("_async") and name.removesuffix("_async") in public_methods(client)
        key = f"{client.__name__}.{name.removesuffix('_async')}"
        assert key in CASES, f"{client.__name__}.{name} is new: give it a case in tests/clients/methods.py"
        call = CASES[key](bench)
        asked.found.clear()
        what = outcome(lambda call=call, name=name: getattr(call.on, name)(*call.args, **(call.named or {})))
        line = row(f"`{name}`", list(asked.found), what, NOTES.get(key, ""))
        if not twin:
            mine, pending = line, name
            yield line
        elif line != mine.replace(f"`{pending}`", f"`{name}`"):
            yield line


def test_the_table_says_what_becomes_of_every_method_and_command(bench: Bench, asked: Asked, tmp_path: Path) -> None:
    lines = [INTRO]
    for client in CLIENTS:
        lines += [f"## {client.__name__}\n", "| method | endpoints | what happens |", "|---|---|---|"]
        lines += [*methods_of(client, bench, asked), ""]
    lines += ["## Arguments\n", "| argument | endpoints | what happens |", "|---|---|---|"]
    for name, attempt in ARGUMENTS.items():
        asked.found.clear()
        what = outcome(lambda attempt=attempt: attempt(bench))
        lines.append(row(name, list(asked.found), what))
    lines += ["", "## The `tinker` program\n", "| command | endpoints | what happens |", "|---|---|---|"]
    for name in sorted(commands()):
        assert name in COMMANDS, f"`tinker {name}` is new: give it a case in tests/clients/commands.py"
        words = COMMANDS[name](bench)
        asked.found.clear()
        done = run(bench.url, f"{name} {' '.join(words)}", tmp_path / name.replace(" ", "-"))
        what = "works" if done.returncode == 0 else f"refused: {complaint(done.stderr)}"
        lines.append(row(f"`tinker {name}`", list(asked.found), what, NOTES.get(name, "")))
    text = "\n".join(lines) + "\n"
    if os.environ.get("TINSMITH_WRITE") == "1":
        TABLE.write_text(text)
    old = TABLE.read_text() if TABLE.is_file() else ""
    changed = "\n".join(difflib.unified_diff(old.splitlines(), text.splitlines(), "committed", "found", lineterm=""))
    assert not changed, f"{TABLE.name} is stale; write it with `TINSMITH_WRITE=1 make test-clients`\n{changed}"


def test_no_case_is_left_of_a_method_that_is_gone() -> None:
    known = {f"{client.__name__}.{name}" for client in CLIENTS for name in public_methods(client)}
    assert sorted(set(CASES) - known) == []
    assert sorted(set(COMMANDS) - set(commands())) == []

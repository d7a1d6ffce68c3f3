"""The pure parts behind what the SDK lists: searches, timelines, signed addresses, copies of folders."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from tinker.proto import response_conv

from tinsmith.api.http.tenancy.names import TinkerPath, external_name, parse_path
from tinsmith.api.http.tenancy.records import SessionRecord
from tinsmith.api.http.tenancy.signed import expiry, is_signed, signature
from tinsmith.api.http.tinker.copies import link_folder
from tinsmith.api.http.tinker.encoding.results import as_proto
from tinsmith.api.http.tinker.encoding.search import Found, page, read_search
from tinsmith.api.http.tinker.encoding.timeline import timeline
from tinsmith.bus.events import Streamed
from tinsmith.bus.protocol.codec import encode, pack_ragged
from tinsmith.bus.protocol.envelope import SAMPLE_LANE, Event, Kind
from tinsmith.bus.protocol.errors import Gap, InvalidInput


def test_sessions_of_one_instant_are_each_on_one_page() -> None:
    sessions = [Found(f"s{n}", SessionRecord(owner="me", created=1e9), None, True) for n in range(5)]
    others = [Found("s9", SessionRecord(owner="you", created=1e9), None, True)]
    cursor, names = None, []
    while True:
        found, cursor = page(read_search({"limit": 2, "cursor": cursor}), "me", [*sessions, *others])
        names += [one.session for one in found]
        if cursor is None:
            break
    assert names == ["s4", "s3", "s2", "s1", "s0"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"limit": 0}, "limit"),
        ({"statuses": [{"type": "asleep"}]}, "statuses.0.type"),
        ({"colour": "blue"}, "colour"),
        ({"cursor": {"last_created_at": "yesterday", "last_session_id": "s"}}, "cursor.last_created_at"),
    ],
)
def test_a_wrong_search_names_its_field(body: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_search(body)
    assert caught.value.field == field


def _streamed(name: str, model: str, **changes: object) -> Streamed:
    event = Event.model_validate(
        {"id": name, "model": model, "kind": Kind.FORWARD, "seq": 1, "n": 3, "ok": True, **changes}
    )
    return Streamed(event, model, "1-3", 100.0)


def test_a_timeline_has_a_span_where_the_time_is_known_and_says_what_is_missing() -> None:
    items: list[Streamed | Gap] = [
        Gap("gone", missed=2, model="s-1:train:0"),
        Gap("gone", missed=9, model=SAMPLE_LANE),
        _streamed("s-1:train:0:1", "s-1:train:0", timing={"queued": 1.0, "run": 2.0, "total": 3.0}),
        _streamed("s-1:sample:0:0", SAMPLE_LANE),
        _streamed("s-11:sample:0:0", SAMPLE_LANE),
    ]
    trace = timeline("s-1", items)
    assert trace is not None
    title, *_, span, mark = trace["traceEvents"]
    assert title["args"]["name"] == "session s-1 (2 earlier events are no longer kept)"
    assert (span["ph"], span["ts"], span["dur"]) == ("X", 98e6, 2e6)
    assert (mark["ph"], mark["ts"]) == ("i", 100e6)
    assert timeline("s-2", items) is None


def test_an_address_is_good_for_its_thing_and_its_time_alone() -> None:
    until = expiry()
    good = signature(b"secret", "thing", until)
    assert is_signed(b"secret", "thing", until, good)
    assert not is_signed(b"secret", "other", until, good)
    assert not is_signed(b"secret", "thing", until + 1, good)
    assert not is_signed(b"another", "thing", until, good)
    assert not is_signed(b"secret", "thing", until, "é")
    past = int(time.time()) - 1
    assert not is_signed(b"secret", "thing", past, signature(b"secret", "thing", past))


def test_a_linked_folder_is_whole_or_absent_and_outlives_its_source(tmp_path: Path) -> None:
    source, target = tmp_path / "model" / "one", tmp_path / "copy" / "one"
    (source / "deep").mkdir(parents=True)
    (source / "a").write_text("a")
    (source / "deep" / "b").write_text("b")
    link_folder(source, target)
    link_folder(source, target)
    for file in (source / "a", source / "deep" / "b"):
        file.unlink()
    assert ((target / "a").read_text(), (target / "deep" / "b").read_text()) == ("a", "b")
    assert [it.name for it in target.parent.iterdir()] == ["one"]
    with pytest.raises(FileNotFoundError):
        link_folder(tmp_path / "none", tmp_path / "copy" / "two")
    assert [it.name for it in target.parent.iterdir()] == ["one"]


def test_external_weights_have_a_path_of_their_own_over_the_version_that_they_are() -> None:
    path = parse_path("tinker://m/external_weights/x", "external_weights")
    assert path.place == "m/external.x"
    assert path.stored == TinkerPath("m", "sampler_weights", external_name("x", 1))
    assert path.stored.shown == path
    plain = TinkerPath("m", "sampler_weights", "x")
    assert plain.stored == plain == plain.shown
    for name in ("external.x", "@1", "a/b", None, "x" * 120):
        with pytest.raises(InvalidInput):
            external_name(name, 1)


def test_tokens_drawn_at_the_prompts_positions_reach_the_sdk_in_their_shape() -> None:
    tokens, logprobs = np.array([[4, 5, 6], [7, 8, 9]], np.int32), np.full((2, 3), -1.5, np.float32)
    tree = {
        "tokens": pack_ragged([np.array([1], np.int32)]),
        "logprobs": pack_ragged([np.array([-1.0], np.float32)]),
        "prompt_draws_tokens": tokens,
        "prompt_draws_logprobs": logprobs,
    }
    event = Event(id="s:1", model=SAMPLE_LANE, kind=Kind.SAMPLE, seq=-1, ok=True, result={"stop_reasons": ["stop"]})
    drawn = response_conv.deserialize_sample_response(as_proto(event, encode(tree))).prompt_alt_tokens
    assert drawn is not None
    assert drawn.tokens.to_numpy().tolist() == tokens.tolist()
    assert drawn.logprobs.to_numpy().tolist() == logprobs.tolist()

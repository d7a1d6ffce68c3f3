"""Sessions, training runs and checkpoints through the official SDK: listed, searched, moved, copied, refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import tinker
from gateway_app import Running
from tinker import types

from tinsmith.api.http.gateway import Gateway
from tinsmith.api.http.retention.sweeper import end_session

pytestmark = pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning")

KEY = "tml-rest"
PROMPT = types.ModelInput.from_ints([1, 2, 3, 4])


@pytest.fixture(scope="module")
def client(app: Running) -> Iterator[tinker.ServiceClient]:
    """A tenant of its own, so that what it lists is what these tests made."""
    metadata = {"team": "blue"}
    with tinker.ServiceClient(
        base_url=app.url, api_key=KEY, user_metadata=metadata, project_id="first", display_name="Nightly Run"
    ) as made:
        yield made


@pytest.fixture(scope="module")
def rest(app: Running) -> tinker.RestClient:
    return tinker.RestClient(base_url=app.url, api_key=KEY)


def train(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client("tiny", rank=2).result()


def session_of(model: tinker.TrainingClient) -> str:
    return str(model.model_id).partition(":")[0]


def logprobs(client: tinker.ServiceClient, path: str) -> list[float | None]:
    return list(client.create_sampling_client(model_path=path).result().compute_logprobs(PROMPT).result())


def test_lists_are_cut_into_pages_that_join_to_the_whole(
    app: Running, client: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    made = [train(client) for _ in range(3)]
    for model in made:
        for name in ("a", "b"):
            model.save_state(name).result()
    whole = rest.list_training_runs(limit=100).result()
    assert [run.training_run_id for run in whole.training_runs][:3] == [model.model_id for model in reversed(made)]
    pages = [rest.list_training_runs(limit=2, offset=at).result() for at in range(0, len(whole.training_runs), 2)]
    assert [run for page in pages for run in page.training_runs] == whole.training_runs
    assert {page.cursor.total_count for page in pages} == {len(whole.training_runs)}
    assert (pages[1].cursor.offset, pages[1].cursor.limit) == (2, 2)
    everything = rest.list_user_checkpoints(limit=100).result()
    pages_of = [rest.list_user_checkpoints(limit=4, offset=at).result() for at in (0, 4)]
    assert [it.tinker_path for page in pages_of for it in page.checkpoints] == [
        it.tinker_path for it in everything.checkpoints
    ][:8]
    assert pages_of[0].cursor is not None
    assert pages_of[0].cursor.total_count == len(everything.checkpoints) >= 6
    assert rest.list_training_runs(limit=5, offset=1000).result().training_runs == []
    answer = app.http(KEY).get("/api/v1/training_runs", params={"offset": -1})
    assert (answer.status_code, "offset" in answer.json()["detail"]) == (400, True)


def test_a_session_is_found_by_what_its_client_said_of_it(
    app: Running, client: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    mine = session_of(train(client))

    def found(**asked: Any) -> list[str]:
        page = rest.search_sessions(types.SessionSearchRequest(**asked)).result()
        return [one.session_id for one in page.sessions]

    hits: list[dict[str, Any]] = [
        {"session_id": mine},
        {"display_name": "run nightly"},
        {"display_name": "no such name", "session_id": mine},
        {"user_metadata": {"team": "blue"}},
        {"project_ids": ["first"]},
        {"statuses": [{"type": "active"}]},
        {"owner": {"type": "accessible"}},
    ]
    misses: list[dict[str, Any]] = [
        {"session_id": "s-0000000000000000"},
        {"display_name": "nightly walk"},
        {"user_metadata": {"team": "blue", "more": "1"}},
        {"project_ids": ["second"]},
        {"statuses": [{"type": "client_finished"}], "session_id": mine},
        {"statuses": [{"type": "failed"}, {"type": "cancelled"}]},
        {"owner": {"type": "user", "owner_urns": ["somebody"]}},
    ]
    for asked in hits:
        assert mine in found(**asked), asked
    for asked in misses:
        assert mine not in found(**asked), asked
    other = tinker.RestClient(base_url=app.url, api_key="tml-stranger")
    assert other.search_sessions(types.SessionSearchRequest(session_id=mine)).result().sessions == []
    (summary,) = rest.search_sessions(types.SessionSearchRequest(session_id=mine)).result().sessions
    assert (summary.project_id, summary.display_name, summary.user_metadata) == (
        "first",
        "Nightly Run",
        {"team": "blue"},
    )
    assert summary.checkpoints_count == len(rest.list_user_checkpoints(limit=1000).result().checkpoints)
    wrong = app.http(KEY).post("/api/v1/sessions/search", json={"limit": 1000})
    assert (wrong.status_code, "limit" in wrong.json()["detail"]) == (400, True)


def test_pages_of_a_search_join_to_the_whole_newest_first(app: Running) -> None:
    key = "tml-pages"
    for number in range(5):
        with tinker.ServiceClient(base_url=app.url, api_key=key, display_name=f"n{number}") as made:
            made.create_sampling_client(base_model="tiny").result()
    rest = tinker.RestClient(base_url=app.url, api_key=key)
    request, names = types.SessionSearchRequest(limit=2), []
    while True:
        page = rest.search_sessions(request).result()
        names += [one.display_name for one in page.sessions]
        if page.next_cursor is None:
            break
        request = request.model_copy(update={"cursor": page.next_cursor})
    assert names == ["n4", "n3", "n2", "n1", "n0"]
    finished = {"type": "client_finished", "reasons": ["success"]}
    assert len(rest.search_sessions(types.SessionSearchRequest(statuses=[finished])).result().sessions) == 5


async def test_a_session_that_is_over_is_told_so_and_stays_to_be_found(
    app: Running, client: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    own = tinker.ServiceClient(base_url=app.url, api_key=KEY, user_metadata={"count": 3})  # type: ignore[dict-item]
    model = train(own)
    session = session_of(model)
    path = model.save_state("kept").result().path
    own.close("errored", "the disk was full").result()
    door = await Gateway.open(app.settings)
    try:
        await end_session(door, session)
    finally:
        await door.close()
    http = app.http(KEY)
    assert http.post("/api/v1/session_heartbeat", json={"session_id": session}).status_code == 410
    assert session not in rest.list_sessions(limit=1000).result().sessions
    (summary,) = rest.search_sessions(types.SessionSearchRequest(session_id=session)).result().sessions
    assert isinstance(summary.status, types.ClientSessionFinished)
    assert (summary.status.reason.type, summary.status.detail) == ("errored", "the disk was full")
    assert summary.checkpoints_count == 1
    info = rest.get_session(session).result()
    assert (info.training_run_ids, info.user_metadata) == ([model.model_id], {"count": "3"})
    resumed = client.create_training_client_from_state(path).result()
    assert resumed.get_info().lora_rank == 2
    made = http.post("/api/v1/create_sampling_session", json={"session_id": session, "sampling_session_seq_id": 9})
    assert made.status_code == 400


def test_a_session_moves_to_another_project_with_its_training_runs(app: Running, rest: tinker.RestClient) -> None:
    with tinker.ServiceClient(base_url=app.url, api_key=KEY) as own:
        model = train(own)

        def runs(project: str) -> list[str]:
            listed = rest.list_training_runs(limit=1000, project_id=project).result().training_runs
            return [run.training_run_id for run in listed]

        assert model.model_id in runs("default")
        rest.assign_session_project(session_of(model), "second").result()
        assert model.model_id in runs("second")
        assert model.model_id not in runs("default")
        other = tinker.RestClient(base_url=app.url, api_key="tml-stranger")
        with pytest.raises(tinker.NotFoundError):
            other.assign_session_project(session_of(model), "third").result()
        with pytest.raises(tinker.BadRequestError, match="project"):
            rest.assign_session_project(session_of(model), "not a name").result()


def test_a_copy_outlives_its_source_and_can_not_be_trained(
    app: Running, client: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    model = train(client)
    state, version = model.save_state("s").result().path, model.save_weights_for_sampler("v").result().path
    before = logprobs(client, version)
    kept_state = client.copy_weights(state, ttl_seconds=3600).result()
    kept_version = rest.copy_weights(version, "archive").result()
    for path in (state, version):
        rest.delete_checkpoint_from_tinker_path(path).result()
    assert logprobs(client, kept_version) == before
    assert client.create_training_client_from_state_with_optimizer(kept_state).result().get_info().lora_rank == 2
    run = rest.get_training_run_by_tinker_path(kept_state).result()
    assert (run.base_model, run.user_metadata) == ("tiny", {"copied_from": state})
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.expires_at is not None
    archived = rest.list_training_runs(project_id="archive").result().training_runs
    assert [one.training_run_id for one in archived] == [kept_version.split("/")[2]]
    http = app.http(KEY)
    step = http.post("/api/v1/optim_step", json={"model_id": run.training_run_id, "seq_id": 1, "adam_params": {}})
    future = http.post("/api/v1/retrieve_future", json={"request_id": step.json()["request_id"]}).json()
    assert future["category"] == "user"
    body = {"source_path": kept_version, "destination_project_id": "archive"}
    twice = [http.post("/api/v1/copy_weights", json=body, headers={"x-idempotency-key": "k"}).json() for _ in "12"]
    assert twice[0] == twice[1] != {"tinker_path": kept_version}


def test_only_what_is_published_is_copied_by_others(app: Running, client: tinker.ServiceClient) -> None:
    path = train(client).save_weights_for_sampler("mine").result().path
    mine = tinker.RestClient(base_url=app.url, api_key=KEY)
    other = tinker.RestClient(base_url=app.url, api_key="tml-stranger")
    with pytest.raises(tinker.NotFoundError, match="there is no"):
        other.copy_weights(path, "theirs").result()
    with pytest.raises(tinker.BadRequestError, match="no access tokens"):
        other.copy_weights(path, "theirs", weights_access_token="secret").result()
    mine.publish_checkpoint_from_tinker_path(path).result()
    copied = other.copy_weights(path, "theirs").result()
    mine.unpublish_checkpoint_from_tinker_path(path).result()
    assert other.get_weights_info_by_tinker_path(copied).result().lora_rank == 2
    with pytest.raises(tinker.NotFoundError):
        other.get_weights_info_by_tinker_path(path).result()


def test_what_is_not_offered_is_refused_at_once(app: Running, rest: tinker.RestClient) -> None:
    admin = tinker.AdminClient(base_url=app.url, api_key=KEY)
    day = ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z")
    refusals: list[tuple[Callable[[], Any], str]] = [
        (admin.get_audit_log, "no audit log"),
        (lambda: admin.get_billing_usage(*day), "bills nothing"),
        (admin.get_current_checkpoint_storage_usage, "bills nothing"),
    ]
    begun = time.monotonic()
    for attempt, words in refusals:
        with pytest.raises(tinker.BadRequestError, match=words) as caught:
            attempt().result()
        assert "Remedy" in str(caught.value)
    for method in ("GET", "DELETE"):
        answer = app.http(KEY).request(method, "/api/v1/auth/apikey/me")
        assert (answer.status_code, "TINKER_API_KEY" in answer.json()["detail"]) == (400, True)
    assert time.monotonic() - begun < 20, "a client that tries again does so for minutes"


def test_a_sessions_trace_shows_each_of_its_commands_and_no_others(app: Running, rest: tinker.RestClient) -> None:
    with tinker.ServiceClient(base_url=app.url, api_key=KEY) as own:
        own.create_sampling_client(base_model="tiny").result()
        session = own.holder.get_session_id()
        with pytest.raises(RuntimeError, match="no events"):
            rest.export_session_trace(session).result()
        model = train(own)
        model.save_state("one").result()
        with pytest.raises(tinker.RequestFailedError):
            model.load_state(f"tinker://{model.model_id}/weights/none").result()
        logprobs(own, model.save_weights_for_sampler("v").result().path)
        url = rest.export_session_trace(session).result()
    trace = httpx.get(url).json()["traceEvents"]
    rows = {it["tid"]: it["args"]["name"] for it in trace if it["name"] == "thread_name"}
    shown = [(rows[it["tid"]], it["name"], it["args"]["ok"]) for it in trace if it["ph"] != "M"]
    assert sorted(shown) == sorted(
        [
            (model.model_id, "create_model", True),
            (model.model_id, "save", True),
            (model.model_id, "load", False),
            (model.model_id, "publish", True),
            ("samples", "sample", True),
        ]
    )
    spans = [(it["ts"], it["ts"] + it["dur"]) for it in trace if it["ph"] == "X"]
    now = time.time() * 1e6
    assert all(now - 600e6 < begun <= ended < now + 60e6 for begun, ended in spans)
    assert httpx.get(httpx.URL(url).copy_set_param("signature", "forged")).status_code == 403
    with pytest.raises(tinker.NotFoundError):
        tinker.RestClient(base_url=app.url, api_key="tml-stranger").export_session_trace(session).result()

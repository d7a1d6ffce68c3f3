"""Requests that a network repeats, reorders or forges: each takes effect once, in its turn, for its owner."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from gateway_app import Running, running

from tinsmith.api.http.gateway import Gateway
from tinsmith.api.http.retention.sweeper import end_session, sweep
from tinsmith.api.http.settings import HttpSettings
from tinsmith.api.http.tenancy.names import unload_id
from tinsmith.api.http.tinker.encoding import tinsmith_pb2 as pb
from tinsmith.bus.protocol.errors import UnknownModel

PROTO = {"content-type": "application/x-protobuf"}
OPTIM = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}


class Client:
    """A client that speaks the protocol by hand."""

    def __init__(self, app: Running, key: str = "tml-one") -> None:
        self.http = app.http(key)
        self.session = self.post("create_session", tags=[], sdk_version="0.38.0").json()["session_id"]

    def post(self, path: str, /, **body: Any) -> httpx.Response:
        return self.http.post(f"/api/v1/{path}", json=body)

    def result(self, request: str, accept: str = "application/json") -> httpx.Response:
        while True:
            headers = {"accept": accept}
            answer = self.http.post("/api/v1/retrieve_future", json={"request_id": request}, headers=headers)
            if answer.status_code != 408:
                return answer

    def model(self, number: int = 0) -> str:
        lora = {"rank": 2, "seed": 3, "train_attn": True, "train_mlp": True, "train_unembed": False}
        asked = {"session_id": self.session, "model_seq_id": number, "base_model": "tiny", "lora_config": lora}
        future = self.post("create_model", **asked).json()["request_id"]
        return str(self.result(future).json()["model_id"])

    def step(self, model: str, seq: int, **changes: Any) -> str:
        params = {**OPTIM, **changes}
        return str(self.post("optim_step", model_id=model, seq_id=seq, adam_params=params).json()["request_id"])

    def batch(self, body: bytes, **headers: str) -> str:
        answer = self.http.post("/api/v1/forward_backward", content=body, headers={**PROTO, **headers})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["request_id"])


def message(model: str, seq: int, *, loss: str = "cross_entropy", tokens: int = 4) -> bytes:
    request = pb.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn=loss)
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(1, tokens + 1, dtype="<i4").tobytes()
    target = datum.loss_fn_inputs["target_tokens"]
    target.dense, target.dtype = np.arange(2, tokens + 2, dtype="<i8").tobytes(), pb.DTYPE_INT64
    target.shape.append(tokens)
    return bytes(request.SerializeToString())


@pytest.fixture
def client(app: Running) -> Client:
    return Client(app)


def test_a_repeated_request_is_the_same_one_and_a_changed_one_is_told(client: Client) -> None:
    model = client.model()
    first = client.batch(message(model, 1))
    again = client.batch(zstandard.compress(message(model, 1)), **{"content-encoding": "zstd"})
    changed = client.batch(message(model, 1, tokens=5))
    assert first == again != changed
    step = client.step(model, 2)
    assert client.step(model, 2) == step
    answer = client.result(changed).json()
    assert answer["category"] == "user"
    assert "another content" in answer["error"]
    assert client.result(step).json()["metrics"]["step"] == 1
    # What was fetched can be fetched again, whole.
    bodies = [client.result(first, "application/x-protobuf").content for _ in range(2)]
    assert bodies[0] == bodies[1]
    assert pb.ForwardBackwardOutput.FromString(bodies[0]).loss_fn_outputs[0].num_datums == 1


def test_requests_run_in_the_order_of_their_numbers_however_they_arrive(client: Client) -> None:
    model = client.model()
    step = client.step(model, 4)
    late = [client.batch(message(model, seq)) for seq in (3, 2)]
    assert client.http.post("/api/v1/retrieve_future", json={"request_id": "x-none"}).status_code == 410
    first = client.batch(message(model, 1, loss="no_such_loss"))
    assert client.result(first).json()["category"] == "user"
    for request in late:
        assert "loss:sum" in client.result(request).json()["metrics"]
    assert client.result(step).json()["metrics"]["step"] == 1


def test_a_refused_body_takes_its_turn(client: Client) -> None:
    model = client.model()
    broken = pb.ForwardBackwardRequest.FromString(message(model, 1))
    broken.data[0].loss_fn_inputs["target_tokens"].shape[0] = 9
    refused = client.batch(broken.SerializeToString())
    nameless = client.step(model, 2, learning_rate="fast")
    good = client.batch(message(model, 3))
    assert "target_tokens" in client.result(refused).json()["error"]
    assert "lr" in client.result(nameless).json()["error"]
    assert "metrics" in client.result(good).json()


def test_older_clients_speak_json(client: Client) -> None:
    model = client.model()
    tensor = {"data": [2, 3], "dtype": "int64", "shape": [2]}
    datum = {"model_input": {"chunks": [{"tokens": [1, 2]}]}, "loss_fn_inputs": {"target_tokens": tensor}}
    content = {"data": [datum], "loss_fn": "cross_entropy"}
    future = client.post("forward", forward_input=content, model_id=model, seq_id=1).json()["request_id"]
    output = client.result(future).json()
    assert output["metrics"]["loss:sum"] == pytest.approx(
        -sum(output["loss_fn_outputs"][0]["logprobs"]["data"]), rel=1e-5
    )
    both = client.post("forward_backward", forward_backward_input=content, model_id=model, seq_id=2).json()
    assert client.result(both["request_id"]).json()["metrics"].keys() == output["metrics"].keys()


def test_an_unnamed_version_is_the_same_however_often_it_is_asked_for(client: Client) -> None:
    model = client.model()
    ids = [
        client.post("save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=n).json()[
            "request_id"
        ]
        for n in (0, 1)
    ]
    assert ids[0] == ids[1]
    sampler = client.result(ids[0]).json()["sampling_session_id"]
    prompt = {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]}
    asked = {"sampling_session_id": sampler, "prompt": prompt, "num_samples": 2, "sampling_params": {"max_tokens": 2}}
    answer = client.post("asample", seq_id=10**18, **asked).json()
    assert len(answer["sample_sequence_ids"]) == 2
    sample = client.result(answer["request_id"]).json()
    assert [len(one["tokens"]) for one in sample["sequences"]] == [len(one["logprobs"]) for one in sample["sequences"]]


def test_tenants_see_nothing_of_each_other(app: Running, client: Client) -> None:
    model = client.model()
    saved = client.post("save_weights", model_id=model, seq_id=1, path="mine").json()["request_id"]
    path = client.result(saved).json()["path"]
    other = Client(app, "tml-two")
    assert other.post("get_info", model_id=model).status_code == 404
    assert other.post("optim_step", model_id=model, seq_id=2, adam_params=OPTIM).status_code == 404
    assert other.post("retrieve_future", request_id=saved).status_code == 404
    assert other.post("weights_info", tinker_path=path).status_code == 404
    assert other.http.get("/api/v1/training_runs").json()["training_runs"] == []
    assert other.http.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/mine").status_code == 404
    load = other.post("load_weights", session_id=other.session, model_seq_id=0, path=path, optimizer=False).json()
    assert "there is no" in other.result(load["request_id"]).json()["error"]
    assert client.http.post(f"/api/v1/training_runs/{model}/checkpoints/weights/mine/publish").status_code == 200
    load = other.post("load_weights", session_id=other.session, model_seq_id=1, path=path, optimizer=False).json()
    assert other.result(load["request_id"]).json()["path"] == path


def test_only_known_keys_are_let_in_where_keys_are_set(settings: HttpSettings) -> None:
    with running(settings.model_copy(update={"api_keys": ("tml-known",)})) as app:
        assert app.http("tml-other").post("/api/v1/create_session", json={}).status_code == 401
        assert app.http("tml-known").post("/api/v1/create_session", json={}).status_code == 200


async def test_a_silent_session_ends_with_all_that_is_its_own(client: Client, settings: HttpSettings) -> None:
    model = client.model()
    unnamed = client.post("save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=0).json()
    client.result(unnamed["request_id"])
    named = client.post("save_weights", model_id=model, seq_id=2, path="kept", ttl_seconds=50).json()
    client.result(named["request_id"])
    door = await Gateway.open(settings)
    try:
        now = time.time()
        assert client.session not in await door.store.silent(now - 900, now - 60)
        assert client.session in await door.store.silent(now + 900, now - 60)
        await door.store.finish(client.session)
        assert client.session in await door.store.silent(now - 900, now + 60)
        await end_session(door, client.session)
        assert client.post("session_heartbeat", session_id=client.session).status_code == 410
        assert list(settings.folder("sampler_weights", model).iterdir()) == []
        assert settings.folder("weights", f"{model}/kept").is_dir()
        event, _ = await door.inbox.wait(unload_id(model), 30)
        assert event.ok
        assert client.result(client.step(model, 3)).json()["category"] == "user"
        await sweep(door, now + 55)
        assert not settings.folder("weights", f"{model}/kept").is_dir()
    finally:
        await door.close()


async def test_a_version_that_another_session_samples_from_outlives_its_own(
    app: Running, client: Client, settings: HttpSettings
) -> None:
    model, other = client.model(), Client(app)
    unnamed = client.post("save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=0).json()
    client.result(unnamed["request_id"])
    (version,) = settings.folder("sampler_weights", model).iterdir()
    path = f"tinker://{model}/sampler_weights/{version.name}"
    asked = {"session_id": other.session, "sampling_session_seq_id": 0, "model_path": path}
    assert other.post("create_sampling_session", **asked).status_code == 200
    door = await Gateway.open(settings)
    try:
        await end_session(door, client.session)
        assert version.is_dir()
        await end_session(door, other.session)
        assert version.is_dir()  # Of a session that is over: a leftover from now on.
    finally:
        await door.close()


async def test_a_refusal_outlives_the_replica_that_gave_it(settings: HttpSettings) -> None:
    one, other = await Gateway.open(settings), await Gateway.open(settings)
    try:
        request = await one.refuse(UnknownModel("gone"))
        event, _ = await other.outcome(request, 1)
        assert json.dumps(event.error)
        assert not event.ok
    finally:
        await one.close()
        await other.close()


def test_a_result_that_is_not_there_yet_is_to_be_asked_for_again(settings: HttpSettings) -> None:
    with running(settings.model_copy(update={"poll_seconds": 0.2})) as app:
        client = Client(app)
        early = client.step(client.model(), 9)
        answer = client.post("retrieve_future", request_id=early, allow_metadata_only=True)
        assert (answer.status_code, answer.json()["type"]) == (408, "try_again")
        target = {"sampling_session_id": f"{client.session}:sample:0", "cloned_sampler_id": 0}
        none = client.post("retrieve_futures", target=target, prev_cursor=7, retrieved_request_ids=[], timeout=0.0)
        assert none.json() == {"completions": [], "cursor": 7}


def test_what_lanes_did_for_one_tenant_no_other_sees(app: Running, client: Client) -> None:
    """Samples through every dialect, listened to by the lane's name and without one."""
    other = Client(app, "tml-two")
    asked = {"kind": "sample", "args": {"max_tokens": 1}, "prompt": [1, 2]}
    made = []
    for who in (client, other):
        made.append(who.http.post("/v1/commands", json=asked).json()["id"])
        assert who.http.get(f"/v1/commands/{made[-1]}?wait=30").json()["event"]["ok"]
    assert other.http.get(f"/v1/commands/{made[0]}").status_code == 404
    for listened in ("", "&models=@sample"):
        for who, own, others in ((client, made[0], made[1]), (other, made[1], made[0])):
            with who.http.stream("GET", f"/v1/events?since=0{listened}") as stream:
                for line in stream.iter_lines():
                    assert others not in line
                    if own in line:
                        break


def test_a_name_in_anothers_session_can_not_be_taken(app: Running, client: Client) -> None:
    other = Client(app, "tml-two")
    wanted = f"{client.session}:train:0"
    args = {"base": "tiny", "lora": {"rank": 2}}
    stolen = other.http.post("/v1/commands", json={"model": wanted, "kind": "create_model", "args": args})
    assert stolen.status_code == 404
    turn = {"kind": "sample", "args": {"max_tokens": 1}, "prompt": [1], "id": f"{wanted}:1"}
    assert other.http.post("/v1/commands", json=turn).status_code == 404
    assert client.model() == wanted
    assert client.result(client.batch(message(wanted, 1))).status_code == 200
    assert other.post("get_info", model_id=wanted).status_code == 404


def test_results_of_a_native_model_are_its_owners_whatever_they_are_called(app: Running, client: Client) -> None:
    other = Client(app, "tml-two")
    create = {"model": "native", "kind": "create_model", "args": {"base": "tiny", "lora": {"rank": 2}}}
    made = client.http.post("/v1/commands", json={**create, "id": "anything-1"}).json()["id"]
    assert client.http.get(f"/v1/commands/{made}?wait=30").json()["event"]["ok"]
    assert other.post("retrieve_future", request_id=made).status_code == 404
    for name in ("native", "native:3", "native:sampler:3"):
        assert other.http.get(f"/v1/commands/{name}").status_code == 404
    # And nothing can be said beforehand of what another will save.
    other.post("save_weights", model_id="native", seq_id=1, path="final", ttl_seconds=1)
    save = {"model": "native", "kind": "save", "args": {"name": "final"}}
    saved = client.http.post("/v1/commands", json=save).json()["id"]
    assert client.http.get(f"/v1/commands/{saved}?wait=30").json()["event"]["ok"]
    listed = client.http.get("/api/v1/training_runs/native/checkpoints").json()["checkpoints"]
    assert [one["expires_at"] for one in listed] == [None]


def test_what_took_the_name_of_a_published_checkpoint_is_not_public(app: Running, client: Client) -> None:
    model, other = client.model(), Client(app, "tml-two")
    client.result(client.post("save_weights", model_id=model, seq_id=1, path="x").json()["request_id"])
    assert client.http.post(f"/api/v1/training_runs/{model}/checkpoints/weights/x/publish").status_code < 300
    path = f"tinker://{model}/weights/x"
    assert other.post("weights_info", tinker_path=path).status_code == 200
    again = client.post("save_weights", model_id=model, seq_id=2, path="x", overwrite=True).json()
    assert "error" not in client.result(again["request_id"]).json()
    assert other.post("weights_info", tinker_path=path).status_code == 404


def test_what_was_said_of_a_save_that_failed_is_forgotten(client: Client, settings: HttpSettings) -> None:
    model = client.model()
    asked = {"model_id": model, "path": "v"}
    first = client.post("save_weights_for_sampler", seq_id=1, **asked).json()
    assert "error" not in client.result(first["request_id"]).json()
    failed = client.post("save_weights_for_sampler", seq_id=2, ttl_seconds=1, **asked).json()
    assert "error" in client.result(failed["request_id"]).json()
    listed = client.http.get(f"/api/v1/training_runs/{model}/checkpoints").json()["checkpoints"]
    assert [one["expires_at"] for one in listed] == [None]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/commands", {"kind": "sample", "args": {"max_tokens": 1}, "prompt": [2**31]}),
        ("/v1/completions", {"model": "tiny", "prompt": [2**40], "max_tokens": 1}),
        ("/v1/completions", {"model": "tiny", "prompt": [1], "max_tokens": 0}),
        ("/v1/completions", {"model": "tiny", "prompt": [1], "n": 0}),
    ],
)
def test_numbers_that_nothing_can_hold_are_refused(client: Client, path: str, body: dict[str, Any]) -> None:
    answer = client.http.post(path, json=body)
    assert answer.status_code == 400, answer.text


async def test_a_session_whose_model_has_the_longest_name_ends(client: Client, settings: HttpSettings) -> None:
    name = f"{client.session}:{'a' * (127 - len(client.session))}"
    create = {"model": name, "kind": "create_model", "args": {"base": "tiny", "lora": {"rank": 2}}}
    made = client.http.post("/v1/commands", json=create).json()["id"]
    assert client.http.get(f"/v1/commands/{made}?wait=30").json()["event"]["ok"]
    far = client.post(
        "create_model", session_id=client.session, model_seq_id=10**120, base_model="tiny", lora_config={"rank": 1}
    )
    assert "error" in client.result(far.json()["request_id"]).json()
    endless = client.post("save_weights", model_id=client.model(1), seq_id=1, path="p", ttl_seconds=10**12).json()
    assert client.result(endless["request_id"]).json()["category"] == "user"
    assert client.http.get("/api/v1/checkpoints").status_code == 200
    door = await Gateway.open(settings)
    try:
        await end_session(door, client.session)
        event, _ = await door.inbox.wait(unload_id(name), 30)
        assert event.ok
    finally:
        await door.close()

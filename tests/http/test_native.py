"""The plain API: any command as JSON or msgpack, events as they come, health and metrics."""

from __future__ import annotations

import json

import msgpack
from gateway_app import Running


def test_a_model_trains_over_plain_json_and_its_events_replay(app: Running) -> None:
    http = app.http("tml-plain")
    lora = {"rank": 2, "unembed": False}

    def run(**command: object) -> dict[str, object]:
        accepted = http.post("/v1/commands", json=command)
        assert accepted.status_code == 202, accepted.text
        return dict(http.get(f"/v1/commands/{accepted.json()['id']}?wait=30").json())

    run(model="plain", kind="create_model", args={"base": "tiny", "lora": lora})
    data = [{"tokens": [1, 2, 3], "target_tokens": [2, 3, 4]}]
    batch = run(model="plain", kind="forward_backward", args={"loss": "cross_entropy"}, data=data)
    event, arrays = batch["event"], batch["arrays"]
    assert isinstance(event, dict)
    assert isinstance(arrays, dict)
    assert event["metrics"]["num_tokens:sum"] == 3
    assert len(arrays["logprobs"][0]) == 3
    run(model="plain", kind="optim_step", args={"lr": 0.01})
    with http.stream("GET", "/v1/events?models=plain&since=0") as stream:
        kinds = []
        for line in stream.iter_lines():
            if line.startswith("data:"):
                kinds.append(json.loads(line[5:])["kind"])
            if len(kinds) == 3:
                break
    assert kinds == ["create_model", "forward_backward", "optim_step"]
    assert app.http("tml-else").post("/v1/commands", json={"model": "plain", "kind": "info"}).status_code == 404


def test_msgpack_goes_in_and_comes_out(app: Running) -> None:
    http = app.http()
    headers = {"content-type": "application/msgpack", "accept": "application/msgpack"}
    command = {"kind": "sample", "args": {"max_tokens": 3, "stop_tokens": []}, "prompt": [1, 2]}
    accepted = msgpack.unpackb(http.post("/v1/commands", content=msgpack.packb(command), headers=headers).content)
    answer = http.get(f"/v1/commands/{accepted['id']}?wait=30", headers=headers)
    assert len(msgpack.unpackb(answer.content)["arrays"]["tokens"][0]) == 3


def test_what_is_wrong_with_a_command_is_told_at_once(app: Running) -> None:
    http = app.http()
    for command in ({"kind": "fly", "model": "m"}, {"kind": "sample", "args": {"temperatur": 1}, "prompt": [1]}, {}):
        answer = http.post("/v1/commands", json=command)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_input"


def test_health_and_metrics_tell_of_the_service(app: Running) -> None:
    http = app.http()
    health = http.get("/health")
    assert health.status_code == 200
    assert health.json()["bus"]["server"] in ("redis", "valkey")
    lines = http.get("/metrics").text.splitlines()
    assert "tinsmith_up 1.0" in lines
    assert any(line.startswith("tinsmith_steps_total ") for line in lines)

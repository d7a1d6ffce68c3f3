"""The door as `tinsmith serve` deploys it: on Ray Serve, behind its proxy, here with two replicas."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import httpx
import psutil
import tinker
from serving import processes_of, start_service
from tinker import types


def test_the_sdk_trains_through_two_replicas_and_sigterm_does_not_wait_for_long_polls(
    tiny_model: Path, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("--alias", "tiny", "--ranks", "1", "--port", str(port), "--http-replicas", "2")
    service = start_service(tiny_model, tmp_path / "state", *options)
    started = psutil.Process(service.process.pid).children(recursive=True)
    assert sum("ray::ServeReplica" in " ".join(process.cmdline()) for process in started) == 2
    url = f"http://127.0.0.1:{port}"
    client = tinker.ServiceClient(base_url=url, api_key="tml-serve")
    model = client.create_lora_training_client("tiny", rank=2).result()
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={"target_tokens": [2, 3, 4]})
    batch = model.forward_backward([datum], "cross_entropy")
    step = model.optim_step(types.AdamParams())
    assert batch.result().metrics["num_tokens:sum"] == 3
    assert step.result().metrics["step"] == 1

    http = httpx.Client(base_url=url, headers={"x-api-key": "tml-serve"}, timeout=40)
    params = {"learning_rate": 1e-3}
    early = http.post("/api/v1/optim_step", json={"model_id": model.model_id, "seq_id": 99, "adam_params": params})
    answers: list[object] = []

    def wait_for_ever() -> None:
        try:
            answers.append(http.post("/api/v1/retrieve_future", json=early.json()))
        except httpx.HTTPError as error:
            answers.append(error)

    waiting = threading.Thread(target=wait_for_ever)
    waiting.start()
    http.get("/health").raise_for_status()
    assert service.stop() < 20
    waiting.join(10)
    assert answers
    assert service.process.returncode == 0
    assert processes_of(service.state) == []

"""Training through the official SDK: every loss by its formula, batches of many chunks, custom losses, resumption."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from gateway_app import Running
from tinker import types

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

ADAM = types.AdamParams(learning_rate=1e-2)
ACTION = np.array([0.0, 0.0, 1.0, 1.0, 1.0, 1.0], np.float32)
"""Which of six tokens an action model chose."""
Array = np.ndarray[Any, Any]


@pytest.fixture
def model(sdk: tinker.ServiceClient) -> tinker.TrainingClient:
    return new_model(sdk)


def new_model(sdk: tinker.ServiceClient) -> tinker.TrainingClient:
    return sdk.create_lora_training_client("tiny", rank=4, seed=1).result()


def datum(start: int = 1, tokens: int = 6, **inputs: Any) -> types.Datum:
    """Counts from `start`; each target is the next number."""
    ids = np.arange(start, start + tokens)
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids.tolist()),
        loss_fn_inputs={"target_tokens": ids + 1, **inputs},
    )


def rows(output: types.ForwardBackwardOutput) -> list[Array]:
    return [row["logprobs"].to_numpy().astype(np.float64) for row in output.loss_fn_outputs]


def policy_loss(name: str, p: Array, q: Array, a: Array, config: dict[str, float]) -> float:
    """One datum's loss as the documentation states it: p the model's log-probs, q the sampler's, a the advantages."""
    ratio = np.exp(p - q)
    if name == "gspo":
        ratio = np.exp(np.mean((p - q)[ACTION > 0])) * np.ones_like(p)
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 0.0)
    match name:
        case "importance_sampling":
            terms = -ratio * a
        case "ppo" | "gspo":
            terms = -np.minimum(ratio * a, np.clip(ratio, low, high) * a)
        case "cispo":
            terms = -np.clip(ratio, low, high) * p * a
        case _:
            terms = -(p * a - 0.5 * config["beta"] * (p - q) ** 2)
    return float(terms.sum())


CLIP = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
LOSSES: list[tuple[str, dict[str, float]]] = [
    ("importance_sampling", {}),
    ("ppo", CLIP),
    ("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    ("cispo", CLIP),
    ("gspo", CLIP),
    ("dro", {"beta": 0.05}),
]


@pytest.mark.parametrize(("name", "config"), LOSSES)
def test_each_policy_loss_is_its_formula_over_the_log_probs_it_returns(
    model: tinker.TrainingClient, name: Any, config: dict[str, float]
) -> None:
    probe = model.forward([datum(1), datum(50)], "cross_entropy").result()
    rng = np.random.default_rng(0)
    sampled = [(row + rng.normal(0, 0.3, 6)).astype(np.float32) for row in rows(probe)]
    advantages = [(sign * rng.uniform(0.5, 1, 6) * ACTION).astype(np.float32) for sign in (1, -1)]
    mask = {"sequence_ratio_mask": ACTION} if name == "gspo" else {}
    data = [
        datum(start, logprobs=q, advantages=a, **mask) for start, q, a in zip((1, 50), sampled, advantages, strict=True)
    ]
    output = model.forward_backward(data, name, config).result()
    each = zip(rows(output), sampled, advantages, strict=True)
    expected = sum(policy_loss(name, p, q.astype(np.float64), a.astype(np.float64), config) for p, q, a in each)
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    assert output.metrics["num_tokens:sum"] == (12 if name == "dro" else 8)
    assert np.isfinite(model.optim_step(ADAM).result().metrics["grad_norm"])
    if name in ("ppo", "cispo"):
        # The defaults of the documentation, when a client names none.
        again = model.forward(data, name).result()
        default = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0)}[name]
        bounds = dict(zip(CLIP, default, strict=True))
        each = zip(rows(again), sampled, advantages, strict=True)
        expected = sum(policy_loss(name, p, q.astype(np.float64), a.astype(np.float64), bounds) for p, q, a in each)
        assert again.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


def test_cross_entropy_weighs_each_token_and_takes_several_targets_a_token(model: tinker.TrainingClient) -> None:
    weights = np.array([0.0, 1.0, 0.5, 2.0, -1.0, 0.0], np.float32)
    output = model.forward_backward([datum(weights=weights)], "cross_entropy").result()
    assert output.metrics["loss:sum"] == pytest.approx(-float((rows(output)[0] * weights).sum()), rel=1e-5)
    assert output.metrics["num_tokens:sum"] == 4
    # Two dimensions: torch tensors go out sparse where that is smaller, numpy ones dense.
    targets = torch.zeros((6, 3), dtype=torch.int64)
    shares = torch.zeros((6, 3))
    targets[2], shares[2] = torch.tensor([7, 8, 9]), torch.tensor([0.5, 0.25, 0.25])
    prompt = types.ModelInput.from_ints([1, 2, 3, 4, 5, 6])
    losses = []
    for two in ((targets, shares), (targets.numpy(), shares.numpy())):
        inputs = dict(zip(("target_tokens", "weights"), two, strict=True))
        wide = model.forward([types.Datum(model_input=prompt, loss_fn_inputs=inputs)], "cross_entropy").result()
        (row,) = rows(wide)
        assert row.shape == (6, 3)
        assert wide.metrics["loss:sum"] == pytest.approx(-float((row * shares.numpy()).sum()), rel=1e-5)
        losses.append(wide.metrics["loss:sum"])
    assert losses[0] == losses[1]


def test_forward_has_the_numbers_of_forward_backward_and_leaves_no_gradients(model: tinker.TrainingClient) -> None:
    data = [datum(1, 6), datum(3, 4)]
    seen = model.forward(data, "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="gradients"):
        model.optim_step(ADAM).result()
    both = model.forward_backward(data, "cross_entropy").result()
    assert seen.metrics == both.metrics
    assert [row.tolist() for row in rows(seen)] == [row.tolist() for row in rows(both)]


def test_a_batch_of_three_chunks_has_the_metrics_of_one(app: Running) -> None:
    data = [datum(1 + i % 100, 2 + i % 3) for i in range(2100)]
    outputs, norms = [], []
    with tinker.ServiceClient(base_url=app.url, api_key="tml-one") as client:
        for most in (1024, 4096):
            model = new_model(client)
            config = model.holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": most})
            model.holder._client_config = config
            assert len(list(model._chunked_requests_generator(data))) == (3 if most == 1024 else 1)
            outputs.append(model.forward_backward(data, "cross_entropy").result())
            norms.append(model.optim_step(ADAM).result().metrics["grad_norm"])
    chunked, whole = outputs
    assert chunked.metrics.keys() == whole.metrics.keys()
    # Which rows share a micro-batch, so how much is computed, and the last bit of a log-prob, is a matter of the chunk.
    for name, value in whole.metrics.items():
        if not name.startswith(("tokens_computed", "padding_share", "micro_batches")):
            # The client weighs means by datums when it combines chunks; these have as many tokens, but for one or two.
            near = 1e-3 if name.endswith(":mean") else 1e-5
            assert chunked.metrics[name] == pytest.approx(value, rel=near, abs=1e-6), name
    assert chunked.metrics["loss:sum"] == pytest.approx(-sum(row.sum() for row in rows(chunked)), rel=1e-5)
    assert chunked.metrics["sequences:sum"] == 2100
    assert chunked.metrics["num_tokens:sum"] == sum(2 + i % 3 for i in range(2100))
    for one, other in zip(rows(chunked), rows(whole), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_custom_loss_over_two_chunks_has_the_gradient_of_its_formula(sdk: tinker.ServiceClient) -> None:
    data = [datum(1 + i % 100, 2) for i in range(1030)]

    def squares(data: Sequence[types.Datum], logprobs: Sequence[Any]) -> tuple[Any, dict[str, float]]:
        return sum((row**2).sum() for row in logprobs), {"datums:sum": float(len(data))}

    model, by_hand = new_model(sdk), new_model(sdk)
    output = model.forward_backward_custom(data, squares).result()
    seen = rows(by_hand.forward(data, "cross_entropy").result())
    assert output.metrics["loss:sum"] == pytest.approx(sum((row**2).sum() for row in seen), rel=1e-5)
    assert output.metrics["datums:sum"] == 1030
    weighed = [
        datum(1 + i % 100, 2, weights=(-2 * row).astype(np.float32)) for i, row in zip(range(1030), seen, strict=True)
    ]
    by_hand.forward_backward(weighed, "cross_entropy").result()
    steps = [each.optim_step(ADAM).result().metrics for each in (model, by_hand)]
    assert steps[0] == steps[1]


def test_a_traced_loss_reads_the_inputs_that_it_names(sdk: tinker.ServiceClient, model: tinker.TrainingClient) -> None:
    def weighed(logprobs: Any, advantages: Any) -> tuple[Any, dict[str, Any]]:
        loss = -(logprobs * advantages).sum()
        return loss, {"custom/gain:sum": -loss}

    handle = sdk.create_custom_loss(weighed, {"logprobs": 1, "advantages": 1}).result()
    output = model.forward_backward_custom([datum(advantages=ACTION)], handle).result()
    expected = model.forward([datum(weights=ACTION)], "cross_entropy").result().metrics["loss:sum"]
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    assert output.metrics["custom/gain:sum"] == pytest.approx(-expected, rel=1e-5)


def test_a_resumed_run_is_bit_for_bit_the_one_that_was_not_interrupted(sdk: tinker.ServiceClient) -> None:
    def train(model: tinker.TrainingClient, steps: range) -> list[Any]:
        seen = []
        for step in steps:
            output = model.forward_backward([datum(1 + step), datum(20 + step, 4)], "cross_entropy")
            update = model.optim_step(types.AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=1.0))
            logprobs = [row.tolist() for row in rows(output.result())]
            seen.append((output.result().metrics, logprobs, update.result().metrics))
        return seen

    whole = train(new_model(sdk), range(6))
    first = new_model(sdk)
    begun = train(first, range(3))
    path = first.save_state("half").result().path
    resumed = sdk.create_training_client_from_state_with_optimizer(path).result()
    assert begun + train(resumed, range(3, 6)) == whole
    # The same by loading it into a model that went another way.
    other = new_model(sdk)
    train(other, range(10, 12))
    other.load_state_with_optimizer(path).result()
    assert train(other, range(3, 6)) == whole[3:]


def test_external_weights_are_the_version_as_files_that_others_load(app: Running, model: tinker.TrainingClient) -> None:
    rest = tinker.RestClient(base_url=app.url, api_key="tml-one")
    path = model.save_weights_external("mine", ttl_seconds=3600).result().path
    version = model.save_weights_for_sampler("mine").result().path
    assert path == f"tinker://{model.model_id}/external_weights/mine"
    urls = rest.get_external_weights_urls(path).result().urls
    files = {name: httpx.get(url) for name, url in urls.items()}
    assert all(answer.status_code == 200 for answer in files.values())
    published = app.settings.folder("sampler_weights", f"{model.model_id}/mine")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert files[name].content == (published / name).read_bytes()
    forged = urls["adapter_model.safetensors"].replace("adapter_model.safetensors", "checksums.json")
    assert httpx.get(forged).status_code == 403
    stale = httpx.URL(urls["checksums.json"]).copy_set_param("expires", "1")
    assert httpx.get(stale).status_code == 403
    found = {it.checkpoint_id: it for it in rest.list_checkpoints(model.model_id).result().checkpoints}
    assert set(found) == {"external_weights/mine", "sampler_weights/mine"}
    external = found["external_weights/mine"]
    assert (external.checkpoint_type, external.tinker_path) == ("external", path)
    assert external.expires_at is not None
    run = rest.get_training_run(model.model_id).result()
    assert run.last_sampler_checkpoint is not None
    assert run.last_sampler_checkpoint.tinker_path == version
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert httpx.get(urls["checksums.json"]).status_code == 404
    refusals: list[tuple[Callable[[], Any], str]] = [
        (lambda: model.save_weights_external("external.x"), "can't name"),
        (lambda: model.save_weights_external("sealed", age_encryption_recipients=["age1x"]), "does not encrypt"),
    ]
    for attempt, words in refusals:
        with pytest.raises(tinker.RequestFailedError, match=words):
            attempt().result()
    # A refused turn is taken: the model goes on.
    assert model.forward([datum()], "cross_entropy").result().metrics["num_tokens:sum"] == 6

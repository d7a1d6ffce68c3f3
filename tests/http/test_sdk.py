"""The official SDK, unchanged, against the HTTP door over a running service."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import tinker
from tinker import types

ADAM = types.AdamParams(learning_rate=1e-2)
NewModel = Callable[[], tinker.TrainingClient]


@pytest.fixture
def new_model(sdk: tinker.ServiceClient) -> NewModel:
    """Makes models of rank 4."""
    return lambda: sdk.create_lora_training_client("tiny", rank=4, seed=1, user_metadata={"why": "test"}).result()


def datum(tokens: int = 8, weight: float = 1.0) -> types.Datum:
    """Counts from 1; each target is the next number."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(range(1, tokens + 1))),
        loss_fn_inputs={"target_tokens": list(range(2, tokens + 2)), "weights": [weight] * tokens},
    )


def loss(model: tinker.TrainingClient) -> float:
    return float(model.forward([datum()], "cross_entropy").result().metrics["loss:sum"])


def test_pipelined_steps_train_and_every_metric_reaches_the_user(new_model: NewModel) -> None:
    model = new_model()
    before = loss(model)
    pending = []
    for _ in range(6):
        pending.append((model.forward_backward([datum(), datum(5)], "cross_entropy"), model.optim_step(ADAM)))
    for batch, step in pending:
        output = batch.result()
        assert output.metrics["num_tokens:sum"] == 13
        assert output.metrics["loss:sum"] == pytest.approx(
            -sum(float(row["logprobs"].to_numpy().sum()) for row in output.loss_fn_outputs), rel=1e-5
        )
        assert step.result().metrics["learning_rate"] == ADAM.learning_rate
    assert loss(model) < before


def test_chunks_that_arrive_out_of_order_make_one_batch(new_model: NewModel) -> None:
    whole, halves = new_model(), new_model()
    # More datums than a chunk holds, so the SDK sends the second chunk first.
    chunked = whole.forward_backward([datum(2)] * 1030, "cross_entropy").result()
    assert chunked.metrics["sequences:sum"] == 1030
    assert len(chunked.loss_fn_outputs) == 1030
    for count in (500, 530):
        halves.forward_backward([datum(2)] * count, "cross_entropy").result()
    norms = [model.optim_step(ADAM).result().metrics["grad_norm"] for model in (whole, halves)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_wrong_request_fails_its_own_future_and_nothing_else(new_model: NewModel) -> None:
    model = new_model()
    good = model.forward_backward([datum()], "cross_entropy")
    unknown = model.forward_backward([datum()], "no_such_loss")
    image = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=1)])
    pictured = model.forward_backward(
        [types.Datum(model_input=image, loss_fn_inputs={"target_tokens": [1]})], "cross_entropy"
    )
    named = model.save_state("not a name")
    step = model.optim_step(ADAM)
    assert good.result().metrics["loss:sum"] > 0
    for wrong, words in ((unknown, "no_such_loss"), (pictured, "datum 0"), (named, "not a name")):
        with pytest.raises(tinker.RequestFailedError, match=words) as caught:
            wrong.result()
        assert caught.value.category == types.RequestErrorCategory.User
    assert step.result().metrics["step"] == 1


def test_an_unknown_base_is_refused_by_name(sdk: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.RequestFailedError, match="local/tiny"):
        sdk.create_lora_training_client("no/such-model", rank=4).result()


def test_a_checkpoint_resumes_with_its_optimizer_when_asked_and_without_when_not(
    sdk: tinker.ServiceClient, new_model: NewModel
) -> None:
    model = new_model()
    for _ in range(2):
        model.forward_backward([datum()], "cross_entropy")
        model.optim_step(ADAM).result()
    path = model.save_state("here").result().path
    same = sdk.create_training_client_from_state_with_optimizer(path).result()
    fresh = sdk.create_training_client_from_state(path).result()
    assert loss(same) == loss(fresh) == loss(model)
    steps = []
    for each in (model, same, fresh):
        each.forward_backward([datum()], "cross_entropy")
        steps.append((each.optim_step(ADAM).result().metrics, loss(each)))
    assert steps[0] == steps[1]
    assert steps[2][0]["step"] == 1
    assert steps[2][1] != steps[0][1]


def test_a_checkpoint_that_does_not_exist_makes_no_model(sdk: tinker.ServiceClient, new_model: NewModel) -> None:
    path = new_model().save_state("here").result().path
    with pytest.raises(Exception, match="there is no"):
        sdk.create_training_client_from_state(path.replace("here", "there")).result()


def test_samples_come_from_the_weights_that_were_named(sdk: tinker.ServiceClient, new_model: NewModel) -> None:
    model = new_model()
    prompt = types.ModelInput.from_ints([1, 2, 3, 4])
    # A state and a version may share a name.
    model.save_state("first").result()
    first = sdk.create_sampling_client(model_path=model.save_weights_for_sampler("first").result().path).result()
    before = first.compute_logprobs(prompt).result()
    model.forward_backward([datum()], "cross_entropy")
    model.optim_step(ADAM).result()
    second = model.save_weights_and_get_sampling_client().result()
    after = second.compute_logprobs(prompt).result()
    assert first.compute_logprobs(prompt).result() == before
    assert before[0] is None
    assert after != before
    scored = model.forward(
        [types.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": [2, 3, 4, 5]})], "cross_entropy"
    ).result()
    expected = scored.loss_fn_outputs[0]["logprobs"].to_numpy()[:3].tolist()
    assert after[1:] == pytest.approx(expected, abs=1e-4)


def test_each_sampling_parameter_is_honoured(sdk: tinker.ServiceClient) -> None:
    client = sdk.create_sampling_client(base_model="local/tiny").result()
    prompt = types.ModelInput.from_ints([5, 6, 7])

    def sample(count: int = 1, **params: object) -> list[types.SampledSequence]:
        asked = types.SamplingParams(**params)  # type: ignore[arg-type]
        return list(client.sample(prompt, num_samples=count, sampling_params=asked).result().sequences)

    seeded = sample(3, max_tokens=6, seed=11, stop=[])
    assert [list(one.tokens) for one in seeded] == [
        list(one.tokens) for one in sample(3, max_tokens=6, seed=11, stop=[])
    ]
    assert all(len(one.tokens) == 6 == len(one.logprobs or ()) and one.stop_reason == "length" for one in seeded)
    greedy = sample(2, max_tokens=4, temperature=0.0, stop=[])
    assert list(greedy[0].tokens) == list(greedy[1].tokens)
    (top,) = sample(1, max_tokens=4, top_k=1, stop=[])
    assert list(top.tokens) == list(greedy[0].tokens)
    (stopped,) = sample(1, max_tokens=50, temperature=0.0, stop=[greedy[0].tokens[0]])
    assert (len(stopped.tokens), stopped.stop_reason) == (1, "stop")


def test_alternatives_and_targets_of_prompt_and_samples(sdk: tinker.ServiceClient) -> None:
    client = sdk.create_sampling_client(base_model="tiny").result()
    prompt = types.ModelInput.from_ints([5, 6, 7, 8])
    plain = client.compute_logprobs(prompt).result()
    targets = types.TensorData(data=[6, -1, 7, 9, 8, 3], dtype="int64", shape=[3, 2])
    asked = types.SamplingParams(max_tokens=3, temperature=0.0, stop=[])
    answer = client.sample(
        prompt,
        num_samples=2,
        sampling_params=asked,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
        target_prompt_logprobs=targets,
    ).result()
    assert answer.prompt_logprobs == pytest.approx(plain)
    assert answer.topk_prompt_logprobs is not None
    assert answer.topk_prompt_logprobs[0] is None
    assert [len(row) for row in answer.topk_prompt_logprobs[1:] if row] == [3, 3, 3]
    scores = answer.target_prompt_logprobs.to_numpy()
    assert scores[:, 0].tolist() == pytest.approx(plain[1:])
    assert scores[0, 1] == 0
    for row, best in zip(scores, answer.topk_prompt_logprobs[1:], strict=True):
        assert best is not None
        assert row.max() <= max(best[0][1], 0)
    for sequence in answer.sequences:
        # Greedy: the sampled token is the first of the likeliest.
        assert [row[0][0] for row in sequence.topk_logprobs] == list(sequence.tokens)
        assert [row[0][1] for row in sequence.topk_logprobs] == pytest.approx(list(sequence.logprobs))


def test_sparse_targets_come_back_sparse_and_only_the_last_prompt_tokens_are_scored(sdk: tinker.ServiceClient) -> None:
    client = sdk.create_sampling_client(base_model="tiny").result()
    prompt = types.ModelInput.from_ints([5, 6, 7, 8])
    plain = client.compute_logprobs(prompt).result()
    targets = types.TensorData(
        data=[6, -1, 8],
        dtype="int64",
        shape=[3, 3],
        sparse_crow_indices=[0, 1, 2, 3],
        sparse_col_indices=[2, 0, 1],
    )
    answer = client.sample(
        prompt,
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        prompt_logprobs_last_n=2,
        target_prompt_logprobs=targets,
    ).result()
    assert answer.prompt_logprobs[:2] == [None, None]
    assert answer.prompt_logprobs[2:] == pytest.approx(plain[2:])
    found = answer.target_prompt_logprobs
    assert found.sparse_col_indices == [2, 0, 1]
    assert list(found.data) == pytest.approx([plain[1], 0.0, plain[3]])


def test_a_sample_that_can_not_be_made_fails_as_the_users(sdk: tinker.ServiceClient) -> None:
    client = sdk.create_sampling_client(base_model="tiny").result()
    for params in (types.SamplingParams(max_tokens=10**6), types.SamplingParams(max_tokens=1, top_p=2.0)):
        with pytest.raises(tinker.RequestFailedError) as caught:
            client.sample(types.ModelInput.from_ints([1]), num_samples=1, sampling_params=params).result()
        assert caught.value.category == types.RequestErrorCategory.User


def test_a_hundred_samples_at_once_each_get_their_own(sdk: tinker.ServiceClient) -> None:
    client = sdk.create_sampling_client(base_model="tiny").result()
    params = types.SamplingParams(max_tokens=2, temperature=0.0, stop=[])
    prompts = [types.ModelInput.from_ints([1 + i % 150, 2, 3]) for i in range(100)]
    with ThreadPoolExecutor(20) as pool:
        futures = list(pool.map(lambda it: client.sample(it, num_samples=1, sampling_params=params), prompts))
    many = [list(future.result().sequences[0].tokens) for future in futures]
    alone = [
        list(client.sample(it, num_samples=1, sampling_params=params).result().sequences[0].tokens)
        for it in prompts[:3]
    ]
    assert many[:3] == alone


def test_a_custom_loss_of_the_client_trains(new_model: NewModel) -> None:
    torch = pytest.importorskip("torch")
    model = new_model()

    def squared(data: list[types.Datum], logprobs: list[object]) -> tuple[object, dict[str, float]]:
        total = sum((row**2).sum() for row in logprobs)  # type: ignore[operator]
        return total, {"rows": float(len(data))}

    output = model.forward_backward_custom([datum(4)], squared).result()
    assert isinstance(output.metrics["loss:sum"], float)
    assert math.isfinite(model.optim_step(ADAM).result().metrics["grad_norm"])
    assert torch.is_tensor(torch.zeros(1))


def test_training_runs_and_checkpoints_are_listed_changed_and_deleted(app: object, new_model: NewModel) -> None:
    model = new_model()
    model.save_state("one", ttl_seconds=3600).result()
    model.save_weights_for_sampler("one").result()
    rest = tinker.RestClient(base_url=app.url, api_key="tml-one")  # type: ignore[attr-defined]
    run_id = model.model_id
    run = rest.get_training_run(run_id).result()
    assert (run.base_model, run.lora_rank, run.user_metadata) == ("tiny", 4, {"why": "test"})
    assert run.last_checkpoint is not None
    assert run.last_sampler_checkpoint is not None
    found = {it.checkpoint_id: it for it in rest.list_checkpoints(run_id).result().checkpoints}
    assert set(found) == {"weights/one", "sampler_weights/one"}
    assert found["weights/one"].expires_at is not None
    assert found["weights/one"].size_bytes
    path = found["weights/one"].tinker_path
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    (changed,) = [it for it in rest.list_checkpoints(run_id).result().checkpoints if it.checkpoint_id == "weights/one"]
    assert changed.expires_at is None
    assert changed.public
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert [it.checkpoint_id for it in rest.list_checkpoints(run_id).result().checkpoints] == ["sampler_weights/one"]
    assert run_id in [it.training_run_id for it in rest.list_training_runs().result().training_runs]

"""How each public method of the official SDK is called on a Bench; an `_async` twin is called in the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import tinker
from bench import KEY, PARAMS, PICTURE, PROMPT, Bench, datum
from tinker import types
from tinker.lib.api_future_impl import QueueState

CLIENTS = (
    tinker.ServiceClient,
    tinker.TrainingClient,
    tinker.SamplingClient,
    tinker.RestClient,
    tinker.AdminClient,
)


@dataclass(frozen=True)
class Call:
    """One call: of which object's method, with what."""

    on: Any
    args: tuple[Any, ...] = ()
    named: dict[str, Any] | None = None


def per_datum(logprobs: Any) -> tuple[Any, dict[str, Any]]:
    return -logprobs.sum(), {"custom/tokens:sum": logprobs.sum()}


def whole_batch(data: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
    return sum((row**2).sum() for row in logprobs), {}


def _window() -> tuple[datetime, datetime]:
    until = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return until - timedelta(hours=2), until


def _search(bench: Bench) -> Call:
    return Call(bench.rest, (types.SessionSearchRequest(session_id=bench.session),))


CASES: dict[str, Callable[[Bench], Call]] = {
    "ServiceClient.close": lambda b: Call(tinker.ServiceClient(base_url=b.url, api_key=KEY), ("success",)),
    "ServiceClient.copy_weights": lambda b: Call(
        tinker.ServiceClient(base_url=b.url, api_key=KEY, project_id="archive"), (b.state,)
    ),
    "ServiceClient.create_custom_loss": lambda b: Call(b.service, (per_datum, {"logprobs": 1})),
    "ServiceClient.create_lora_training_client": lambda b: Call(b.service, ("tiny",), {"rank": 2}),
    "ServiceClient.create_rest_client": lambda b: Call(b.service),
    "ServiceClient.create_sampling_client": lambda b: Call(b.service, (b.version,)),
    "ServiceClient.create_training_client_from_state": lambda b: Call(b.service, (b.state,)),
    "ServiceClient.create_training_client_from_state_with_optimizer": lambda b: Call(b.service, (b.state,)),
    "ServiceClient.get_console_url": lambda b: Call(b.service),
    "ServiceClient.get_server_capabilities": lambda b: Call(b.service),
    "ServiceClient.get_telemetry": lambda b: Call(b.service),
    "TrainingClient.create_sampling_client": lambda b: Call(b.training, (b.version,)),
    "TrainingClient.forward": lambda b: Call(b.training, ([datum()], "cross_entropy")),
    "TrainingClient.forward_backward": lambda b: Call(b.training, ([datum()], "cross_entropy")),
    "TrainingClient.forward_backward_custom": lambda b: Call(b.training, ([datum()], whole_batch)),
    "TrainingClient.get_console_url": lambda b: Call(b.training),
    "TrainingClient.get_info": lambda b: Call(b.training),
    "TrainingClient.get_telemetry": lambda b: Call(b.training),
    "TrainingClient.get_tokenizer": lambda b: Call(b.training),
    "TrainingClient.load_state": lambda b: Call(b.training, (b.state,)),
    "TrainingClient.load_state_with_optimizer": lambda b: Call(b.training, (b.state,)),
    "TrainingClient.optim_step": lambda b: Call(b.backward(), (types.AdamParams(learning_rate=1e-4),)),
    "TrainingClient.save_state": lambda b: Call(b.training, (b.name(),), {"ttl_seconds": 3600}),
    "TrainingClient.save_weights_and_get_sampling_client": lambda b: Call(b.training),
    "TrainingClient.save_weights_external": lambda b: Call(b.training, (b.name(),)),
    "TrainingClient.save_weights_for_sampler": lambda b: Call(b.training, (b.name(),)),
    "SamplingClient.compute_logprobs": lambda b: Call(b.sampling, (PROMPT,)),
    "SamplingClient.create": lambda b: Call(tinker.SamplingClient, (b.service.holder,), {"base_model": "tiny"}),
    "SamplingClient.from_sampler_handle": lambda b: Call(
        tinker.SamplingClient, (b.sampling.get_sampler_handle(),), {"api_key": KEY}
    ),
    "SamplingClient.get_base_model": lambda b: Call(b.sampling),
    "SamplingClient.get_sampler_handle": lambda b: Call(b.sampling),
    "SamplingClient.get_telemetry": lambda b: Call(b.sampling),
    "SamplingClient.get_tokenizer": lambda b: Call(b.sampling),
    "SamplingClient.on_queue_state_change": lambda b: Call(b.sampling, (QueueState.ACTIVE, None)),
    "SamplingClient.sample": lambda b: Call(b.sampling, (PROMPT, 1, PARAMS)),
    "RestClient.assign_session_project": lambda b: Call(b.rest, (b.session, "mine")),
    "RestClient.copy_weights": lambda b: Call(b.rest, (b.version, "archive"), {"ttl_seconds": 3600}),
    "RestClient.delete_checkpoint": lambda b: Call(b.rest, (b.run, b.fresh_state().partition(b.run + "/")[2])),
    "RestClient.delete_checkpoint_from_tinker_path": lambda b: Call(b.rest, (b.fresh_state(),)),
    "RestClient.export_session_trace": lambda b: Call(b.rest, (b.session,)),
    "RestClient.get_audit_log": lambda b: Call(b.rest),
    "RestClient.get_billing_usage": lambda b: Call(b.rest, _window()),
    "RestClient.get_current_checkpoint_storage_usage": lambda b: Call(b.rest),
    "RestClient.get_external_weights_urls": lambda b: Call(b.rest, (b.external,)),
    "RestClient.get_sampler": lambda b: Call(b.rest, (b.sampler,)),
    "RestClient.get_server_capabilities": lambda b: Call(b.rest),
    "RestClient.get_session": lambda b: Call(b.rest, (b.session,)),
    "RestClient.get_telemetry": lambda b: Call(b.rest),
    "RestClient.get_training_run": lambda b: Call(b.rest, (b.run,)),
    "RestClient.get_training_run_by_tinker_path": lambda b: Call(b.rest, (b.state,)),
    "RestClient.get_weights_info_by_tinker_path": lambda b: Call(b.rest, (b.version,)),
    "RestClient.list_checkpoints": lambda b: Call(b.rest, (b.run,)),
    "RestClient.list_sessions": lambda b: Call(b.rest),
    "RestClient.list_training_runs": lambda b: Call(b.rest),
    "RestClient.list_user_checkpoints": lambda b: Call(b.rest),
    "RestClient.publish_checkpoint_from_tinker_path": lambda b: Call(b.rest, (b.state,)),
    "RestClient.search_sessions": _search,
    "RestClient.set_checkpoint_ttl_from_tinker_path": lambda b: Call(b.rest, (b.state, 86400)),
    "RestClient.unpublish_checkpoint_from_tinker_path": lambda b: Call(b.rest, (b.state,)),
    "RestClient.whoami": lambda b: Call(b.rest),
    "AdminClient.get_audit_log": lambda b: Call(b.admin),
    "AdminClient.get_billing_usage": lambda b: Call(b.admin, _window()),
    "AdminClient.get_current_checkpoint_storage_usage": lambda b: Call(b.admin),
    "AdminClient.get_telemetry": lambda b: Call(b.admin),
}

Attempt = Callable[[Bench], Any]


def _pictured() -> types.Datum:
    return types.Datum(model_input=PICTURE, loss_fn_inputs={"target_tokens": [1]})


ARGUMENTS: dict[str, Attempt] = {
    "forward_backward: `loss_fn` that is not registered (`stable_reinforce`)": lambda b: b.training.forward_backward(
        [datum()], "stable_reinforce"
    ),
    "forward_backward: an image in `model_input`": lambda b: b.training.forward_backward(
        [_pictured()], "cross_entropy"
    ),
    "create_lora_training_client: `optimizer` other than AdamW": lambda b: b.service.create_lora_training_client(
        "tiny", rank=2, optimizer=types.DimuonOptimizerConfig()
    ),
    "optim_step: parameters of another optimizer": lambda b: b.training.optim_step(
        types.DimuonParams(learning_rate=1e-3)
    ),
    "save_state: `name` that is taken, without `overwrite`": lambda b: b.training.save_state(
        b.state.rpartition("/")[2]
    ),
    "save_weights_external: `age_encryption_recipients`": lambda b: b.training.save_weights_external(
        b.name(), age_encryption_recipients=["age1x"]
    ),
    "create_training_client_from_state: `weights_access_token`": (
        lambda b: b.service.create_training_client_from_state(b.state, weights_access_token="token")
    ),
    "load_state: `weights_access_token`": lambda b: b.training.load_state(b.state, weights_access_token="token"),
    "copy_weights: `weights_access_token`": lambda b: b.rest.copy_weights(
        b.state, "archive", weights_access_token="token"
    ),
    "sample: `topk_prompt_logprobs`, `topk_sample_logprobs`": lambda b: b.sampling.sample(
        PROMPT, 1, PARAMS, include_prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=2
    ),
    "sample: `target_prompt_logprobs`": lambda b: b.sampling.sample(
        PROMPT, 1, PARAMS, target_prompt_logprobs=types.TensorData(data=[1, 2], dtype="int64", shape=[2, 1])
    ),
    "sample: `prompt_logprobs_last_n`": lambda b: b.sampling.sample(
        PROMPT, 1, PARAMS, include_prompt_logprobs=True, prompt_logprobs_last_n=1
    ),
    "sample: `prompt_alt_tokens_k`": lambda b: b.sampling.sample(PROMPT, 1, PARAMS, prompt_alt_tokens_k=2),
    "sample: an image in `prompt`": lambda b: b.sampling.sample(PICTURE, 1, PARAMS),
    "create_sampling_client: `record_stability_info`": lambda b: (
        b.service.create_sampling_client(base_model="tiny", record_stability_info=True)
        .result()
        .sample(PROMPT, 1, PARAMS)
    ),
}


def public_methods(client: type) -> list[str]:
    """Names of all that a user may call on a client."""
    return sorted(name for name in dir(client) if not name.startswith("_") and callable(getattr(client, name)))

"""Published adapters: each row under its own, as PEFT computes it, and nothing in place of a missing one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from sampling_runs import VOCAB, drain, forward_logprobs, request, run, tiny_llama

from tinsmith.actors.sampling.engines.builtin.generator import Generator
from tinsmith.actors.sampling.engines.builtin.sample import Failed, Finished
from tinsmith.actors.sampling.engines.builtin.versions import AdapterHooks, Versions, is_adapter, load_adapter
from tinsmith.bus.protocol.errors import InvalidInput, NonFinite, UnknownVersion, UnsupportedModel

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def publish(path: Path, seed: int, *, targets: list[str] = TARGETS, **config: object) -> peft.PeftModel:
    """A random adapter written by peft itself; returns peft's model with it."""
    torch.manual_seed(seed)
    lora = peft.LoraConfig(r=3, lora_alpha=9, target_modules=targets, init_lora_weights=False, **config)
    wrapped = peft.get_peft_model(tiny_llama(), lora)
    wrapped.eval().save_pretrained(path, save_embedding_layers=False)
    return wrapped


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    root = tmp_path_factory.mktemp("versions")
    models = {
        "m/one": publish(root / "m" / "one", 1),
        "m/two": publish(root / "m" / "two", 2, targets=["q_proj", "v_proj"]),
        "n/three": publish(root / "n" / "three", 3, targets=["gate_proj", "lm_head"], use_rslora=True),
    }
    return root, {"base": tiny_llama(), **models}


def test_every_row_of_a_mixed_batch_runs_under_its_own_version(published, prompts):
    root, models = published
    generator = Generator(tiny_llama(), locate=root.joinpath, max_rows=7)
    requests = [
        request(f"{version} {i}", prompt, version, max_tokens=8 + i, seed=i, stop_tokens=(), prompt_logprobs=True)
        for i, prompt in enumerate(prompts[1:6])
        for version in models
    ]
    answers = run(generator, requests)
    for one in requests:
        answer, model = answers[one.id], models[one.version]
        scores = forward_logprobs(model, np.concatenate([one.prompt, answer.sequences[0].tokens]))
        np.testing.assert_allclose(answer.sequences[0].logprobs, scores[len(one.prompt) - 1 :], atol=1e-4)
        assert answer.prompt_logprobs is not None
        np.testing.assert_allclose(answer.prompt_logprobs[1:], scores[: len(one.prompt) - 1], atol=1e-4)
        assert answer.version == one.version


def test_one_version_alone_equals_peft(published, prompts):
    root, models = published
    generator = Generator(tiny_llama(), locate=root.joinpath)
    answers = run(generator, [request(str(i), p, "m/one", max_tokens=10, temperature=0) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        sequence = answers[str(i)].sequences[0]
        scores = forward_logprobs(models["m/one"], np.concatenate([prompt, sequence.tokens]))
        np.testing.assert_allclose(sequence.logprobs, scores[len(prompt) - 1 :], atol=1e-4)


def test_the_base_alone_pays_for_no_hook(published):
    root, _ = published
    model = tiny_llama()
    hooks = AdapterHooks(model)
    adapter = load_adapter(root / "m" / "one", "m/one", model)
    hooks.apply([(None, adapter)])
    assert sum(len(module._forward_hooks) for module in model.modules()) == len(adapter.weights) == 15
    hooks.apply(())
    assert sum(len(module._forward_hooks) for module in model.modules()) == 0


def test_a_missing_version_is_an_error_never_another_one(published):
    root, _ = published
    generator = Generator(tiny_llama(), locate=root.joinpath)
    run(generator, [request("a", [5], "m/two", max_tokens=1)])
    with pytest.raises(UnknownVersion, match="m/later"):
        generator.submit(request("b", [5], "m/later", max_tokens=1))


def test_a_version_deleted_before_it_runs_fails_its_own_request_alone(tmp_path):
    publish(tmp_path / "m" / "gone", 4)
    generator = Generator(tiny_llama(), locate=tmp_path.joinpath)
    generator.submit(request("gone", [5, 6], "m/gone", max_tokens=3, n=4))
    generator.submit(request("base", [5, 6], max_tokens=3))
    (tmp_path / "m" / "gone" / "adapter_model.safetensors").unlink()
    answers = drain(generator)
    assert isinstance(answers["gone"], Failed)
    assert isinstance(answers["gone"].error, UnknownVersion)
    assert isinstance(answers["base"], Finished)


def test_logits_that_are_not_finite_fail_their_own_request_alone(tmp_path):
    publish(tmp_path / "bad", 4)
    weights = tmp_path / "bad" / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if "down_proj.lora_B" in name)
    save_file({**tensors, name: torch.full_like(tensors[name], float("nan"))}, weights)
    generator = Generator(tiny_llama(), locate=tmp_path.joinpath)
    plain = request("plain", [7, 8, 9], max_tokens=6, n=2, seed=3, stop_tokens=())
    expected = run(Generator(tiny_llama()), [plain])["plain"]
    generator.submit(plain)
    generator.step()
    generator.submit(request("bad", [7, 8], "bad", max_tokens=6, n=3))
    answers = drain(generator)
    assert isinstance(answers["bad"], Failed)
    assert isinstance(answers["bad"].error, NonFinite)
    assert isinstance(answers["plain"], Finished)
    for got, want in zip(answers["plain"].sequences, expected.sequences, strict=True):
        assert got.tokens.tolist() == want.tokens.tolist()


def test_adapters_are_held_under_a_bound_and_read_again(published):
    root, _ = published
    versions = Versions(tiny_llama(), root.joinpath, max_count=2, max_bytes=1 << 30)
    one = versions.get("m/one")
    versions.get("m/two")
    assert versions.get("m/one") is one
    versions.get("n/three")
    assert len(versions) == 2
    assert versions.get("m/one") is one
    again = versions.get("m/two")
    assert again is not None
    assert again.key == "m/two"
    small = Versions(tiny_llama(), root.joinpath, max_count=9, max_bytes=1)
    small.get("m/one")
    small.get("m/two")
    assert len(small) == 1


def test_a_whole_model_is_told_from_an_adapter(published, tmp_path):
    root, _ = published
    tiny_llama().save_pretrained(tmp_path / "full")
    assert is_adapter(root / "m" / "one")
    assert not is_adapter(tmp_path / "full")
    with pytest.raises(InvalidInput, match="whole model"):
        Generator(tiny_llama(), locate=tmp_path.joinpath).submit(request("a", [5], "full", max_tokens=1))


def _edit(path: Path, **changes: object) -> None:
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": [*TARGETS, "q_proj", "lm_head"], "r": 4}, "rank 4"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "biases"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
    ],
)
def test_an_adapter_that_asks_for_more_than_is_applied_is_refused(tmp_path, changes, message):
    publish(tmp_path / "a", 1)
    _edit(tmp_path / "a", **changes)
    with pytest.raises(UnsupportedModel, match=message):
        load_adapter(tmp_path / "a", "a", tiny_llama())


def test_an_adapter_with_missing_or_strange_tensors_is_refused(tmp_path):
    publish(tmp_path / "a", 1)
    weights = tmp_path / "a" / "adapter_model.safetensors"
    whole = load_file(weights)
    layer = {name for name in whole if "layers.1.mlp.up_proj" in name}
    save_file({name: tensor for name, tensor in whole.items() if name not in layer}, weights)
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.mlp\.up_proj"):
        load_adapter(tmp_path / "a", "a", tiny_llama())
    strange = {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(3, VOCAB)}
    save_file({**whole, **strange}, weights)
    with pytest.raises(UnsupportedModel, match="embed_tokens"):
        load_adapter(tmp_path / "a", "a", tiny_llama())

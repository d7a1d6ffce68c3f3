"""The reference itself is right: its log-probs, gradients and steps equal transformers' and torch's own in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from reference.cases import CONFIGS, LOSSES, random_batch
from reference.reference import ReferenceTrainer
from transformers import LlamaConfig, LlamaForCausalLM

from tinsmith.bus.protocol.datum import Datum

VOCAB = 24


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def test_logprobs_and_cross_entropy_gradient_equal_those_of_transformers(model):
    tokens = [3, 1, 4, 1, 5, 9, 2]
    judge = copy.deepcopy(model).double().eval()
    logits = judge(input_ids=torch.tensor([tokens[:-1]])).logits[0]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="sum")
    loss.backward()
    trainer = ReferenceTrainer(copy.deepcopy(model))
    datum = Datum(tokens[:-1], {"target_tokens": tokens[1:]})
    logprobs, rows = trainer.forward_backward([datum], "cross_entropy")
    expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(logprobs[0], expected.detach())
    assert rows["loss"] == pytest.approx([loss.item()])
    assert rows["entropy"] == pytest.approx([torch.distributions.Categorical(logits=logits).entropy().sum().item()])
    for name, parameter in judge.named_parameters():
        torch.testing.assert_close(trainer.parameters[name].grad, parameter.grad)


def test_gradients_add_up_over_calls_and_steps_equal_torch(model):
    trainer = ReferenceTrainer(copy.deepcopy(model))
    judge = copy.deepcopy(model).double()
    optimizer = torch.optim.AdamW(judge.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for seed in range(3):
        data = random_batch(seed, (4, 3), VOCAB, "ppo")
        for datum in data:
            trainer.forward_backward([datum], "ppo", CONFIGS["ppo"])
        gradients = trainer.gradients()
        for name, parameter in judge.named_parameters():
            parameter.grad = gradients[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(judge.parameters(), 0.5)
        optimizer.step()
        got = trainer.optim_step(lr=1e-2, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.5)
        assert got["grad_norm"] == pytest.approx(norm.item())
    for name, parameter in judge.named_parameters():
        torch.testing.assert_close(trainer.parameters[name], parameter)


def test_only_the_given_parameters_are_trained(model):
    module = copy.deepcopy(model)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    name = "model.layers.0.self_attn.q_proj.weight"
    chosen = dict(module.named_parameters())[name].requires_grad_()
    trainer = ReferenceTrainer(module, {name: chosen})
    before = copy.deepcopy(module.state_dict())
    trainer.forward_backward(random_batch(0, (4,), VOCAB, "cross_entropy"), "cross_entropy")
    trainer.optim_step(lr=1e-2)
    after = module.state_dict()
    assert [key for key in after if not torch.equal(after[key], before[key])] == [name]


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_runs_and_forward_alone_gives_the_same_rows_and_no_gradient(model, loss):
    trainer = ReferenceTrainer(copy.deepcopy(model))
    data = random_batch(0, (5, 2), VOCAB, loss)
    logprobs, rows = trainer.forward(data, loss, CONFIGS[loss])
    assert all(parameter.grad is None for parameter in trainer.parameters.values())
    again, same = trainer.forward_backward(data, loss, CONFIGS[loss])
    assert rows == same
    assert all(torch.equal(a, b) for a, b in zip(logprobs, again, strict=True))
    assert sum(g.abs().sum() for g in trainer.gradients().values()) > 0

"""Losses by name: an unknown name, key, type or range is refused; a user's own loss is a first-class one."""

from __future__ import annotations

import math

import pytest
import torch

from tinsmith.actors.engine.batch import collate, validate_batch
from tinsmith.actors.engine.losses.registry import (
    ConfigField,
    Loss,
    LossOutput,
    LossRegistry,
    TokenInputs,
    evaluate,
    keep,
    load_losses,
)
from tinsmith.bus.protocol.datum import Datum
from tinsmith.bus.protocol.errors import CommandFailed, InvalidDatum, InvalidLossConfig, StartupError, UnknownLoss

REGISTRY = LossRegistry.builtin()


@pytest.fixture
def my_losses(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.path.parent))
    return "my_losses"


def test_the_six_built_in_losses_are_registered():
    assert REGISTRY.names == ("cispo", "cross_entropy", "dro", "gspo", "importance_sampling", "ppo")


def test_an_unknown_loss_is_refused_and_the_registered_ones_are_listed():
    with pytest.raises(UnknownLoss, match=r"cross_entropie.*cispo, cross_entropy, dro, gspo, importance_sampling, ppo"):
        REGISTRY.get("cross_entropie")
    with pytest.raises(UnknownLoss):
        REGISTRY.parse_config("cross_entropie", {})


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("cross_entropy", {}),
        ("importance_sampling", {}),
        ("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
        ("cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
        ("gspo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    ],
)
def test_defaults_are_those_of_the_tinker_documentation(loss, expected):
    assert REGISTRY.parse_config(loss, {}) == expected


def test_dro_has_no_documented_default_for_beta_so_it_must_be_given():
    with pytest.raises(InvalidLossConfig, match="beta is required"):
        REGISTRY.parse_config("dro", {})
    assert REGISTRY.parse_config("dro", {"beta": 0}) == {"beta": 0.0}


@pytest.mark.parametrize(
    ("loss", "config", "field"),
    [
        ("ppo", {"clip_low": 0.8}, "clip_low"),
        ("cross_entropy", {"beta": 0.1}, "beta"),
        ("importance_sampling", {"clip_high_threshold": 1.0}, "clip_high_threshold"),
        ("ppo", {"clip_low_threshold": "0.8"}, "clip_low_threshold"),
        ("ppo", {"clip_low_threshold": True}, "clip_low_threshold"),
        ("ppo", {"clip_low_threshold": None}, "clip_low_threshold"),
        ("ppo", {"clip_low_threshold": math.nan}, "clip_low_threshold"),
        ("ppo", {"clip_high_threshold": math.inf}, "clip_high_threshold"),
        ("ppo", {"clip_low_threshold": -0.1}, "clip_low_threshold"),
        ("ppo", {"clip_low_threshold": 1.3}, "clip_low_threshold"),
        ("cispo", {"clip_low_threshold": 3.0, "clip_high_threshold": 2.0}, "clip_low_threshold"),
        ("gspo", {"clip_high_threshold": 0.5}, "clip_low_threshold"),
        ("dro", {"beta": -1.0}, "beta"),
    ],
)
def test_a_wrong_config_is_refused_with_the_key_and_the_allowed_ones(loss, config, field):
    with pytest.raises(InvalidLossConfig) as caught:
        REGISTRY.parse_config(loss, config)
    assert caught.value.field == field
    allowed = [item.name for item in REGISTRY.get(loss).config]
    assert all(name in caught.value.remedy for name in allowed)


def test_whole_numbers_and_declared_kinds_are_taken():
    field = ConfigField("mode", type=str, default="a", choices=("a", "b"))
    assert ConfigField("n", type=int, low=0).check(3) == 3
    assert isinstance(REGISTRY.parse_config("dro", {"beta": 1})["beta"], float)
    assert (field.check("b"), ConfigField("on", type=bool).check(True)) == ("b", True)
    for declared, value in ((field, "c"), (ConfigField("n", type=int), 1.5), (ConfigField("on", type=bool), 1)):
        with pytest.raises(ValueError):
            declared.check(value)


def test_a_users_own_loss_trains_and_reports_its_own_columns(my_losses):
    registry = load_losses(my_losses)
    loss = registry.get("reinforce")
    data = [Datum([1, 2], {"target_tokens": [2, 3], "advantages": [1.0, 0.0], "note": [7.0]})]
    validate_batch(data, loss, vocab_size=10, context=4)
    batch = collate(data, [0], ignored=loss.ignored)
    assert set(batch.inputs) == {"advantages"}
    logprobs = torch.tensor([[-6.0, -1.0]], requires_grad=True)
    got = evaluate(
        loss,
        TokenInputs(logprobs, torch.zeros(1, 2), batch.inputs, batch.mask),
        registry.parse_config("reinforce", {"scale": 2}),
    )
    got.total.backward()
    assert logprobs.grad.tolist() == [[-2.0, 0.0]]
    columns = {name: column.item() for name, column in got.columns.items()}
    assert columns["surprising_tokens"] == 1
    assert columns["num_tokens"] == 1
    assert "ratio_sum" not in columns, "without sampler log-probs there is no ratio"
    with pytest.raises(InvalidDatum, match="does not know"):
        validate_batch(
            [Datum([1], {"target_tokens": [2], "advantages": [1.0], "notes": [7.0]})], loss, vocab_size=9, context=4
        )


def test_a_module_that_is_missing_or_registers_nothing_stops_the_start(my_losses):
    with pytest.raises(StartupError, match="can't be imported"):
        load_losses("no_such_module_of_losses")
    with pytest.raises(StartupError, match="no function `register`"):
        load_losses("json")


def test_a_wrong_declaration_stops_the_start():
    def nothing(tokens, config):
        return LossOutput(tokens.logprobs, tokens.mask)

    wrong = [
        Loss("ppo", nothing),
        Loss("Not A Name", nothing),
        Loss("a", nothing, required=("x",), optional=("x",)),
        Loss("a", nothing, required=("target_tokens",)),
        Loss("a", nothing, columns=("loss",)),
        Loss("a", nothing, columns=("b", "b")),
        Loss("a", nothing, bearing=("x",)),
        Loss("a", nothing, averaging=("x",)),
        Loss("a", nothing, config=(ConfigField("k", default=2.0, high=1.0),)),
        Loss("a", nothing, config=(ConfigField("k"), ConfigField("k"))),
        Loss("a", nothing, config=(ConfigField("k"),), low_high=(("k", "z"),)),
    ]
    for loss in wrong:
        registry = LossRegistry.builtin()
        with pytest.raises(StartupError):
            registry.register(loss)
        assert registry.names == REGISTRY.names


@pytest.mark.parametrize(
    "output",
    [
        lambda t: LossOutput(torch.zeros(1), t.mask, {"own": torch.zeros(2)}),
        lambda t: LossOutput(keep(t.mask, t.logprobs), t.mask.float(), {"own": torch.zeros(2)}),
        lambda t: LossOutput(keep(t.mask, t.logprobs), t.mask, {}),
        lambda t: LossOutput(keep(t.mask, t.logprobs), t.mask, {"own": torch.zeros(2), "more": torch.zeros(2)}),
        lambda t: LossOutput(keep(t.mask, t.logprobs), t.mask, {"own": torch.zeros(3)}),
    ],
)
def test_a_registered_loss_that_breaks_its_declaration_fails_loudly(output):
    loss = Loss("mine", lambda tokens, config: output(tokens), columns=("own",))
    tokens = TokenInputs(torch.zeros(2, 3), torch.zeros(2, 3), {}, torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(CommandFailed, match="mine"):
        evaluate(loss, tokens, {})


def test_a_loss_that_marks_padding_is_held_to_the_valid_tokens():
    loss = Loss("mine", lambda t, c: LossOutput(t.logprobs, torch.ones_like(t.mask)))
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    got = evaluate(loss, TokenInputs(logprobs, torch.zeros(1, 2), {}, torch.tensor([[True, False]])), {})
    assert (got.total.item(), got.columns["num_tokens"].item()) == (-1.0, 1.0)

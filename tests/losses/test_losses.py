"""Values, columns, gradients of the built-in losses, against formulas written a second time and finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from reference.cases import CONFIGS, LOSSES, POLICY, random_batch
from reference.reference import reference_loss

from tinsmith.actors.engine.batch import collate, validate_batch
from tinsmith.actors.engine.losses.registry import Evaluation, LossRegistry, TokenInputs, evaluate
from tinsmith.bus.protocol.datum import Datum

REGISTRY = LossRegistry.builtin()
LENGTHS = (5, 1, 9, 3)


def token_inputs(data, seed=0, near=True):
    """A micro-batch of all datums with random log-probs near the sampler's (a leaf, float64) and random entropies."""
    batch = collate(data, range(len(data)))
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(batch.targets.shape, generator=generator, dtype=torch.float64) - 0.5
    if near and "logprobs" in batch.inputs:
        noise = 0.2 * torch.randn(batch.targets.shape, generator=generator, dtype=torch.float64)
        logprobs = batch.inputs["logprobs"].double() + noise
    entropy = torch.rand(batch.mask.shape, generator=generator, dtype=torch.float64)
    inputs = {name: value.double() for name, value in batch.inputs.items()}
    return TokenInputs(logprobs.requires_grad_(), entropy, inputs, batch.mask)


def run(loss, tokens, config=None) -> Evaluation:
    return evaluate(
        REGISTRY.get(loss), tokens, REGISTRY.parse_config(loss, CONFIGS[loss] if config is None else config)
    )


def by_the_reference(loss, data, tokens, config=None):
    """(gradient of the log-probs, rows) one datum and one token at a time."""
    gradient = torch.zeros_like(tokens.logprobs)
    rows = []
    for row, datum in enumerate(data):
        n = len(datum.tokens)
        leaves = tokens.logprobs.detach()[row, :n].clone().requires_grad_()
        scalars = [list(leaf) if leaf.dim() else leaf for leaf in leaves]
        total, columns = reference_loss(
            loss, scalars, tokens.entropy[row].tolist(), datum.inputs, CONFIGS[loss] if config is None else config
        )
        if isinstance(total, torch.Tensor) and total.requires_grad:
            total.backward()
            gradient[row, :n] = leaves.grad
        rows.append(columns)
    return gradient, rows


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("seed", range(5))
def test_loss_columns_and_gradient_equal_the_reference(loss, seed):
    data = random_batch(seed, LENGTHS, 50, loss)
    validate_batch(data, REGISTRY.get(loss), vocab_size=50, context=16)
    tokens = token_inputs(data, seed)
    got = run(loss, tokens)
    got.total.backward()
    gradient, rows = by_the_reference(loss, data, tokens)
    torch.testing.assert_close(tokens.logprobs.grad, gradient, rtol=1e-9, atol=1e-12)
    assert set(got.columns) == set(rows[0])
    for name, column in got.columns.items():
        assert column.dtype == torch.float64
        expected = torch.tensor([row[name] for row in rows], dtype=torch.float64)
        torch.testing.assert_close(
            column, expected, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert got.total.item() == pytest.approx(sum(row["loss"] for row in rows), rel=1e-9)


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo"])
def test_the_clip_is_exercised_by_these_cases(loss):
    clipped = [run(loss, token_inputs(random_batch(seed, LENGTHS, 50, loss), seed)) for seed in range(5)]
    fraction = sum(e.columns["clipped_tokens"].sum() for e in clipped) / sum(
        e.columns["num_tokens"].sum() for e in clipped
    )
    assert 0.05 < fraction < 0.95


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo", "dro"])
def test_gradient_equals_finite_differences(loss):
    tokens = token_inputs(random_batch(3, (4, 2), 50, loss), 3)

    def total(logprobs):
        return run(loss, TokenInputs(logprobs, tokens.entropy, tokens.inputs, tokens.mask)).total

    assert torch.autograd.gradcheck(total, (tokens.logprobs,), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", ["cispo", "gspo"])
def test_gradient_equals_finite_differences_with_the_stopped_part_held(loss):
    """The stop-gradient makes the loss a surrogate: its gradient is that of the formula with sg(...) held fixed."""
    data = random_batch(3, (6,), 50, loss)
    tokens = token_inputs(data, 3)
    run(loss, tokens).total.backward()
    p0, q, a = (x.detach()[0] for x in (tokens.logprobs, tokens.inputs["logprobs"], tokens.inputs["advantages"]))
    low, high = CONFIGS[loss]["clip_low_threshold"], CONFIGS[loss]["clip_high_threshold"]
    over = tokens.inputs["sequence_ratio_mask"][0] != 0 if loss == "gspo" else None

    def surrogate(p):
        if loss == "cispo":
            return -((p0 - q).exp().clamp(low, high) * p * a).sum()
        ratio = (p0 - q)[over].mean().exp() * (p - p0).exp()
        return -torch.minimum(ratio * a, ratio.clamp(low, high) * a).sum()

    step = 1e-6
    for t in range(6):
        bump = torch.zeros(6, dtype=torch.float64)
        bump[t] = step
        slope = (surrogate(p0 + bump) - surrogate(p0 - bump)) / (2 * step)
        assert tokens.logprobs.grad[0, t].item() == pytest.approx(slope.item(), abs=1e-6)


def test_cross_entropy_takes_many_targets_a_token_with_weights_of_the_same_shape():
    data = random_batch(0, (4, 7), 50, "cross_entropy", k=3)
    validate_batch(data, REGISTRY.get("cross_entropy"), vocab_size=50, context=16)
    tokens = token_inputs(data)
    got = run("cross_entropy", tokens)
    got.total.backward()
    gradient, rows = by_the_reference("cross_entropy", data, tokens)
    torch.testing.assert_close(tokens.logprobs.grad, gradient)
    assert got.columns["num_tokens"].tolist() == [row["num_tokens"] for row in rows]
    assert got.columns["loss"].tolist() == pytest.approx([row["loss"] for row in rows])


def test_cross_entropy_without_weights_weighs_every_token_1_and_no_padding():
    data = [Datum([1, 2, 3], {"target_tokens": [2, 3, 4]}), Datum([1], {"target_tokens": [2]})]
    tokens = token_inputs(data)
    got = run("cross_entropy", tokens)
    assert got.columns["num_tokens"].tolist() == [3, 1]
    assert got.total.item() == pytest.approx(-(tokens.logprobs[0].sum() + tokens.logprobs[1, 0]).item())


def test_weights_of_a_half_give_half_the_gradient():
    data = [Datum([1, 2], {"target_tokens": [2, 3], "weights": [1.0, 1.0]})]
    half = [Datum([1, 2], {"target_tokens": [2, 3], "weights": [0.5, 0.5]})]
    whole, halved = token_inputs(data), token_inputs(half)
    run("cross_entropy", whole).total.backward()
    run("cross_entropy", halved).total.backward()
    torch.testing.assert_close(halved.logprobs.grad, whole.logprobs.grad / 2)
    assert whole.logprobs.grad.tolist() == [[-1.0, -1.0]]


def test_a_zero_weight_sequence_changes_nothing_of_its_neighbours():
    datum = Datum([1, 2], {"target_tokens": [2, 3], "weights": [1.0, 1.0]})
    silent = Datum([1, 2], {"target_tokens": [2, 3], "weights": [0.0, 0.0]})
    alone, beside = token_inputs([datum]), token_inputs([datum, silent])
    run("cross_entropy", alone).total.backward()
    run("cross_entropy", beside).total.backward()
    assert torch.equal(beside.logprobs.grad[0], alone.logprobs.grad[0])
    assert beside.logprobs.grad[1].tolist() == [0.0, 0.0]


def test_the_last_and_every_other_target_bears_its_own_loss():
    tokens = token_inputs([Datum([1, 2, 3], {"target_tokens": [2, 3, 4], "weights": [1.0, 2.0, 3.0]})])
    run("cross_entropy", tokens).total.backward()
    assert tokens.logprobs.grad.tolist() == [[-1.0, -2.0, -3.0]]


@pytest.mark.parametrize("loss", POLICY)
def test_an_all_masked_datum_has_loss_0_and_identity_extremes_and_no_nan(loss):
    data = random_batch(0, (3, 4), 50, loss)
    inputs = {**data[0].inputs, "advantages": np.zeros(3), "mask": np.zeros(3)}
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = np.zeros(3)
    data = [Datum(data[0].tokens, inputs), Datum(data[1].tokens, {**data[1].inputs, "mask": np.ones(4)})]
    validate_batch(data, REGISTRY.get(loss), vocab_size=50, context=16)
    tokens = token_inputs(data)
    got = run(loss, tokens)
    got.total.backward()
    row = {name: column[0].item() for name, column in got.columns.items()}
    highest = dict.fromkeys(("ratio_max", "logprob_gap_max"), -math.inf)
    assert row == dict.fromkeys(row, 0.0) | highest | {"ratio_min": math.inf, "tokens": 3, "sequences": 1}
    assert tokens.logprobs.grad[0].tolist() == [0.0] * 4
    assert tokens.logprobs.grad[1].abs().sum() > 0


def test_all_tokens_of_weight_0_give_loss_0_and_gradient_0():
    tokens = token_inputs([Datum([1, 2], {"target_tokens": [2, 3], "weights": [0.0, 0.0]})])
    got = run("cross_entropy", tokens)
    got.total.backward()
    assert got.total.item() == 0
    assert got.columns["num_tokens"].tolist() == [0]
    assert tokens.logprobs.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_a_masked_position_holds_leaves_no_trace(loss, bad):
    data = random_batch(1, (16, 9), 50, loss)
    clean, dirty = token_inputs(data), token_inputs(data)
    bearing = clean.bearing(REGISTRY.get(loss).bearing)
    if loss == "dro":
        mask = clean.mask & (torch.arange(16) % 2 == 0)
        clean.inputs["mask"] = mask.double()
        dirty.inputs["mask"] = mask.double()
        bearing = mask
    if loss == "gspo":
        bearing = bearing | (clean.inputs["sequence_ratio_mask"] != 0)
    assert (~bearing & clean.mask).any(), "the case has a masked token"
    with torch.no_grad():
        dirty.logprobs[~bearing] = bad
        dirty.entropy[~bearing] = bad
        if loss != "cross_entropy":
            dirty.inputs["logprobs"][~bearing] = bad
    expected, got = run(loss, clean), run(loss, dirty)
    expected.total.backward()
    got.total.backward()
    assert torch.equal(got.total, expected.total)
    assert torch.equal(dirty.logprobs.grad, clean.logprobs.grad)
    for name, column in expected.columns.items():
        assert torch.equal(got.columns[name], column), name


@pytest.mark.parametrize("loss", LOSSES)
def test_the_function_alone_gives_exactly_0_where_no_loss_is_borne(loss):
    tokens = token_inputs(random_batch(1, (16, 9), 50, loss))
    if loss in POLICY:
        # Against the advantages, so that masked tokens have one.
        tokens.inputs["mask"] = (tokens.mask & (torch.arange(16) % 2 == 0)).double()
    bearing = tokens.bearing(REGISTRY.get(loss).bearing)
    unread = ~bearing & (tokens.inputs.get("sequence_ratio_mask", torch.zeros(())) == 0)
    with torch.no_grad():
        tokens.logprobs[unread] = math.inf
        if loss != "cross_entropy":
            tokens.inputs["logprobs"][unread] = math.nan
    output = REGISTRY.get(loss).function(tokens, REGISTRY.parse_config(loss, CONFIGS[loss]))
    assert torch.equal(output.loss_mask, bearing)
    assert output.per_token[~bearing].abs().sum() == 0
    output.per_token.sum().backward()
    assert torch.isfinite(tokens.logprobs.grad).all()
    assert tokens.logprobs.grad[~bearing].abs().sum() == 0


def test_padding_never_bears_loss_whatever_the_inputs_hold_there():
    mask = torch.tensor([[True, False]])
    for inputs in ({"weights": torch.ones(1, 2)}, {"weights": torch.ones(1, 2, 3)}, {}):
        tokens = TokenInputs(torch.zeros(1, 2), torch.zeros(1, 2), inputs, mask)
        assert tokens.bearing(("weights",)).tolist() == [[True, False]]


def test_a_target_of_weight_0_among_k_takes_no_part_even_at_minus_infinity():
    data = [Datum([1, 2], {"target_tokens": [[2, 3], [4, 5]], "weights": [[1.0, 0.0], [0.5, 0.5]]})]
    tokens = token_inputs(data)
    with torch.no_grad():
        tokens.logprobs[0, 0, 1] = -math.inf
    got = run("cross_entropy", tokens)
    got.total.backward()
    assert math.isfinite(got.total.item())
    assert tokens.logprobs.grad.tolist() == [[[-1.0, 0.0], [-0.5, -0.5]]]


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_a_ratio_that_overflows_but_is_clipped_keeps_its_gradient_finite(loss):
    inputs = {"target_tokens": [2, 3], "logprobs": [-1000.0, -1.0], "advantages": [1.0, 0.5]}
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = [1.0, 1.0]
    tokens = token_inputs([Datum([1, 2], inputs)], near=False)
    got = run(loss, tokens, {})
    got.total.backward()
    assert math.isfinite(got.total.item())
    assert torch.isfinite(tokens.logprobs.grad).all()


def test_a_token_of_advantage_0_under_an_explicit_mask_counts_and_adds_exactly_0():
    inputs = {"target_tokens": [2, 3], "logprobs": [-1000.0, -1.0], "advantages": [0.0, 0.5], "mask": [1.0, 1.0]}
    for loss in ("importance_sampling", "ppo"):
        tokens = token_inputs([Datum([1, 2], inputs)], near=False)
        got = run(loss, tokens, {})
        got.total.backward()
        assert got.columns["num_tokens"].tolist() == [2]
        assert tokens.logprobs.grad[0, 0] == 0
        assert math.isfinite(got.total.item())


def test_dro_counts_every_token_and_others_those_with_an_advantage():
    for loss in POLICY:
        inputs = {"target_tokens": [2, 3, 4], "logprobs": [-1.0, -1.0, -1.0], "advantages": [0.0, 1.0, 0.0]}
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = [1.0, 1.0, 1.0]
        got = run(loss, token_inputs([Datum([1, 2, 3], inputs)]))
        assert got.columns["num_tokens"].tolist() == [3 if loss == "dro" else 1], loss


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo"])
def test_per_token_thresholds_take_the_place_of_the_config(loss):
    base = random_batch(2, (12, 9, 8, 8), 50, loss)
    low, high = CONFIGS[loss]["clip_low_threshold"], CONFIGS[loss]["clip_high_threshold"]
    data = [
        Datum(d.tokens, {**d.inputs, "clip_low_threshold": [low] * len(d), "clip_high_threshold": [high] * len(d)})
        for d in base
    ]
    validate_batch(data, REGISTRY.get(loss), vocab_size=50, context=16)
    expected, got = run(loss, token_inputs(base)), run(loss, token_inputs(data), {})
    torch.testing.assert_close(got.total, expected.total, rtol=1e-6, atol=1e-7)
    assert torch.equal(got.columns["clipped_tokens"], expected.columns["clipped_tokens"])
    assert run(loss, token_inputs(base), {}).total != got.total


def test_float32_inputs_give_a_float32_total_and_float64_columns():
    data = random_batch(0, (6, 4), 50, "ppo")
    tokens = token_inputs(data)
    narrow = TokenInputs(
        tokens.logprobs.detach().float().requires_grad_(),
        tokens.entropy.float(),
        {name: value.float() for name, value in tokens.inputs.items()},
        tokens.mask,
    )
    got, expected = run("ppo", narrow), run("ppo", tokens)
    assert got.total.dtype == torch.float32
    assert {column.dtype for column in got.columns.values()} == {torch.float64}
    for name, column in got.columns.items():
        torch.testing.assert_close(column, expected.columns[name], rtol=1e-5, atol=1e-6)
    assert not any(column.requires_grad for column in got.columns.values())


def test_an_empty_micro_batch_has_total_0_that_is_still_connected_to_the_graph():
    for loss in LOSSES:
        data = random_batch(0, (6, 4), 50, loss)
        batch = collate(data, ())
        assert batch.indices == ()
        assert set(batch.inputs) == set(data[0].inputs) - {"target_tokens"}
        logprobs = torch.full(batch.targets.shape, -1.0, requires_grad=True)
        tokens = TokenInputs(logprobs, torch.zeros(batch.mask.shape), batch.inputs, batch.mask)
        got = run(loss, tokens)
        got.total.backward()
        assert got.total.item() == 0
        assert logprobs.grad.abs().sum() == 0
        assert got.columns["tokens"].tolist() == [0]

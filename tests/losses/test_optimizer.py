"""AdamW honours every argument as torch does, reports what it did, and changes nothing when it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from tinsmith.actors.engine.trainable.optimizer import AdamW
from tinsmith.bus.protocol.commands import OptimStepArgs
from tinsmith.bus.protocol.errors import InvalidInput, NoGradients, NonFinite, UnsupportedModel

SHAPES = {"b": (4, 3), "a": (7,), "c": (2, 2, 2)}
ARGS = OptimStepArgs(lr=1e-2)


def made(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype).requires_grad_() for name, shape in SHAPES.items()}


def feed(parameters, seed, scale=1.0):
    generator = torch.Generator().manual_seed(1000 + seed)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * scale


def snapshot(optimizer, parameters):
    return [p.detach().clone() for p in parameters.values()] + [t.clone() for t in optimizer.state_dict().values()]


def same(before, after):
    return all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fifty_steps_with_changing_arguments_equal_torch(dtype):
    ours, theirs = made(dtype=dtype), made(dtype=dtype)
    optimizer = AdamW(ours)
    judge = torch.optim.AdamW(theirs.values(), lr=1.0)
    for number in range(50):
        args = OptimStepArgs(
            lr=1e-2 / (1 + number % 7),
            beta1=0.9 if number < 20 else 0.7,
            beta2=0.95 if number % 3 else 0.999,
            eps=1e-12 if number < 30 else 1e-4,
            weight_decay=0.1 * (number % 2),
            grad_clip_norm=0.0 if number % 4 else 1.5,
        )
        feed(ours, number, scale=3.0 if number % 5 else 0.01)
        feed(theirs, number, scale=3.0 if number % 5 else 0.01)
        got = optimizer.step(args)
        if args.grad_clip_norm:
            norm = torch.nn.utils.clip_grad_norm_(theirs.values(), args.grad_clip_norm)
            assert got["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
        judge.param_groups[0].update(
            lr=args.lr, betas=(args.beta1, args.beta2), eps=args.eps, weight_decay=args.weight_decay
        )
        judge.step()
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], **tolerance)
    assert optimizer.steps == 50


@pytest.mark.parametrize(
    "change",
    [{"lr": 2e-2}, {"beta1": 0.5}, {"beta2": 0.5}, {"eps": 1e-1}, {"weight_decay": 0.5}, {"grad_clip_norm": 0.1}],
)
def test_each_argument_has_its_own_effect(change):
    results = []
    for args in (ARGS, ARGS.model_copy(update=change)):
        parameters = made()
        optimizer = AdamW(parameters)
        for number in range(3):
            # Gradients of unlike sizes, so that scaling them by each step's own clip shows.
            feed(parameters, number, scale=10.0**-number)
            optimizer.step(args)
        results.append(torch.cat([p.detach().flatten() for p in parameters.values()]))
    assert not torch.allclose(*results, rtol=1e-4)


def test_the_columns_tell_what_was_done():
    parameters = made()
    before = {name: p.detach().clone() for name, p in parameters.items()}
    feed(parameters, 0)
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in parameters.values()))
    got = AdamW(parameters).step(OptimStepArgs(lr=0.003, grad_clip_norm=0.5))

    def total(tensors):
        return math.sqrt(sum(t.double().square().sum().item() for t in tensors))

    assert got == pytest.approx(
        {
            "grad_norm": norm,
            "clip_coef": 0.5 / (norm + 1e-6),
            "param_norm": total(p.detach() for p in parameters.values()),
            "update_norm": total(p.detach() - before[name] for name, p in parameters.items()),
            "learning_rate": 0.003,
            "step": 1,
            "skipped": 0,
        },
        rel=1e-7,
    )


def test_a_norm_below_the_limit_is_not_clipped_and_no_limit_means_no_clip():
    for limit in (0.0, 1e6):
        parameters = made()
        feed(parameters, 0)
        assert AdamW(parameters).step(OptimStepArgs(lr=0.1, grad_clip_norm=limit))["clip_coef"] == 1.0


def test_gradients_are_left_as_they_were():
    parameters = made()
    feed(parameters, 0)
    before = [p.grad.clone() for p in parameters.values()]
    AdamW(parameters).step(OptimStepArgs(lr=0.1, grad_clip_norm=0.1))
    assert same(before, [p.grad for p in parameters.values()])


def test_a_model_is_clipped_by_its_own_norm_whatever_its_neighbour_holds():
    alone, beside, neighbour = made(), made(), made(1)
    feed(alone, 0)
    feed(beside, 0)
    feed(neighbour, 5, scale=1e4)
    other = AdamW(neighbour)
    first, second = AdamW(alone), AdamW(beside)
    other.step(OptimStepArgs(lr=0.1, grad_clip_norm=1.0))
    args = OptimStepArgs(lr=0.1, grad_clip_norm=1.0)
    assert first.step(args) == second.step(args)
    assert same([*alone.values()], [*beside.values()])


def test_the_first_learning_rate_is_used_and_reported():
    parameters = made()
    feed(parameters, 0)
    got = AdamW(parameters).step(OptimStepArgs(lr=0.25))
    assert got["learning_rate"] == 0.25
    assert got["update_norm"] == pytest.approx(0.25 * math.sqrt(sum(p.numel() for p in parameters.values())), rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_refused_before_anything_changes(bad):
    parameters = made()
    optimizer = AdamW(parameters)
    feed(parameters, 0)
    optimizer.step(ARGS)
    feed(parameters, 1)
    parameters["c"].grad[1, 1, 1] = bad
    before = snapshot(optimizer, parameters)
    with pytest.raises(NonFinite, match=r"gradient norm is (nan|inf).*nothing was changed"):
        optimizer.step(OptimStepArgs(lr=1e-2, grad_clip_norm=1.0))
    assert same(before, snapshot(optimizer, parameters))
    feed(parameters, 1)
    assert optimizer.step(ARGS)["step"] == 2


def test_skip_changes_nothing_and_is_counted_and_reported():
    parameters = made()
    optimizer = AdamW(parameters)
    feed(parameters, 0)
    parameters["a"].grad[0] = math.nan
    before = snapshot(optimizer, parameters)[:-1]
    got = optimizer.step(OptimStepArgs(lr=1e-2, weight_decay=0.1, on_non_finite="skip"))
    assert (got["skipped"], got["step"], got["update_norm"], got["clip_coef"]) == (1, 0, 0, 0)
    assert math.isnan(got["grad_norm"])
    assert same(before, snapshot(optimizer, parameters)[:-1])
    assert optimizer.state_dict()["skipped_in_a_row"].item() == 1


def test_skips_in_a_row_end_in_an_error_and_a_good_step_starts_the_count_again():
    parameters = made()
    optimizer = AdamW(parameters)
    args = OptimStepArgs(lr=1e-2, on_non_finite="skip", abort_after=3)

    def step(good):
        feed(parameters, 0)
        if not good:
            parameters["a"].grad[0] = math.inf
        return optimizer.step(args)["skipped"]

    assert [step(False), step(False), step(True), step(False), step(False)] == [1, 1, 0, 1, 1]
    for _ in range(2):
        with pytest.raises(NonFinite, match="3 steps in a row"):
            step(False)
    assert step(True) == 0


@pytest.mark.parametrize(
    ("scale", "args"),
    [
        (0.0, OptimStepArgs(lr=1e-2, eps=0.0)),
        (1e30, OptimStepArgs(lr=1e-2)),
        (1.0, OptimStepArgs(lr=1e37, weight_decay=30.0)),
    ],
    ids=["0 / 0 without eps", "square of a gradient overflows", "update overflows"],
)
def test_a_finite_gradient_that_would_write_nonsense_is_refused_too(scale, args):
    parameters = made()
    optimizer = AdamW(parameters)
    feed(parameters, 0, scale=scale)
    before = snapshot(optimizer, parameters)
    with pytest.raises(NonFinite):
        optimizer.step(args)
    assert same(before, snapshot(optimizer, parameters))


@pytest.mark.parametrize("change", [{"lr": 1e38}, {"lr": 1e20, "weight_decay": 1e20}, {"eps": 1e39}])
def test_arguments_too_large_for_the_parameters_type_are_refused(change):
    parameters = made()
    optimizer = AdamW(parameters)
    feed(parameters, 0)
    before = snapshot(optimizer, parameters)
    with pytest.raises(InvalidInput, match="overflows"):
        optimizer.step(ARGS.model_copy(update=change))
    assert same(before, snapshot(optimizer, parameters))


def test_a_huge_gradient_that_is_clipped_is_fit_to_step_with():
    parameters = made()
    feed(parameters, 0, scale=1e30)
    got = AdamW(parameters).step(OptimStepArgs(lr=1e-2, grad_clip_norm=1.0))
    assert got["skipped"] == 0
    assert got["grad_norm"] > 1e30


def test_a_step_without_any_gradient_is_refused():
    with pytest.raises(NoGradients):
        AdamW(made()).step(ARGS)


def test_a_parameter_without_gradient_counts_as_gradient_0():
    missing, zero = made(), made()
    for parameters in (missing, zero):
        feed(parameters, 0)
    missing["a"].grad = None
    zero["a"].grad.zero_()
    args = OptimStepArgs(lr=1e-2, weight_decay=0.1)
    assert AdamW(missing).step(args) == AdamW(zero).step(args)
    assert same([*missing.values()], [*zero.values()])


def test_zero_grad_forgets_the_gradients():
    parameters = made()
    optimizer = AdamW(parameters)
    feed(parameters, 0)
    optimizer.zero_grad()
    assert all(p.grad is None for p in parameters.values())


def test_a_restored_optimizer_goes_on_bit_for_bit():
    parameters = made()
    optimizer = AdamW(parameters)
    for number in range(3):
        feed(parameters, number)
        optimizer.step(ARGS)
    parameters["a"].grad[0] = math.nan
    optimizer.step(OptimStepArgs(lr=1e-2, on_non_finite="skip"))
    state = {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
    resumed = {name: p.detach().clone().requires_grad_() for name, p in reversed(parameters.items())}
    other = AdamW(resumed)
    other.load_state_dict(state)
    for number in range(3, 6):
        feed(parameters, number)
        for name, parameter in parameters.items():
            resumed[name].grad = parameter.grad.clone()
        assert optimizer.step(ARGS) == other.step(ARGS)
    assert all(torch.equal(resumed[name], parameters[name]) for name in parameters)
    assert same([*optimizer.state_dict().values()], [*other.state_dict().values()])


def test_a_state_dict_stays_as_it_was_when_later_steps_are_taken():
    parameters = made()
    optimizer = AdamW(parameters)
    feed(parameters, 0)
    optimizer.step(ARGS)
    taken = optimizer.state_dict()
    copy = [tensor.clone() for tensor in taken.values()]
    optimizer.step(ARGS)
    assert same(copy, [*taken.values()])


def test_a_loaded_state_is_a_copy_of_its_own():
    optimizer = AdamW(made())
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    state["exp_avg.a"].fill_(7.0)
    assert optimizer.state_dict()["exp_avg.a"].abs().sum() == 0


def test_a_state_of_another_model_is_refused_and_changes_nothing():
    parameters = made()
    optimizer = AdamW(parameters)
    feed(parameters, 0)
    optimizer.step(ARGS)
    before = snapshot(optimizer, parameters)
    state = optimizer.state_dict()
    wrong = [
        {name: tensor for name, tensor in state.items() if name != "exp_avg.a"},
        {name: tensor for name, tensor in state.items() if name != "step"},
        {**state, "exp_avg.z": torch.zeros(1)},
        {**state, "exp_avg_sq.a": torch.zeros(8)},
        {**state, "exp_avg_sq.a": torch.zeros(7, dtype=torch.bfloat16)},
    ]
    for given, field in zip(wrong, ["exp_avg.a", "step", "exp_avg.z", "exp_avg_sq.a", "exp_avg_sq.a"], strict=True):
        with pytest.raises(InvalidInput) as caught:
            optimizer.load_state_dict(given)
        assert caught.value.field == field
        assert same(before, snapshot(optimizer, parameters))


def test_parameters_below_float32_or_none_at_all_are_refused():
    with pytest.raises(UnsupportedModel, match="bfloat16"):
        AdamW({"a": torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)})
    with pytest.raises(UnsupportedModel):
        AdamW({})

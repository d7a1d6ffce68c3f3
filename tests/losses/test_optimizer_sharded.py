"""The sharded optimizer on three real gloo ranks gives what one process gives: norms, weights, state, refusals."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from losses.optimizer_cases import STEPS, values
from losses.optimizer_rank import main
from reference.reference import ReferenceTrainer

from tinsmith.actors.engine.trainable.optimizer import AdamW

LAYOUTS = ("3 ranks", "2 ranks", "2 copies", "2 replicas")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of three ranks saw."""
    folder = tmp_path_factory.mktemp("ranks")
    # Forked, so that each rank has torch loaded already; one thread each, so that no pool of the parent is needed.
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=main, args=(rank, str(folder / "store"), str(folder / f"{rank}.pt")), daemon=True)
        for rank in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in range(3)]


@pytest.fixture(scope="module")
def alone():
    """The same steps in one process: (columns, parameters, state)."""
    parameters = {name: p.requires_grad_() for name, p in values(0).items()}
    optimizer = AdamW(parameters)
    columns = []
    for number, args in enumerate(STEPS):
        for name, gradient in values(number + 1).items():
            parameters[name].grad = gradient
        columns.append(optimizer.step(args))
    return columns, {name: p.detach() for name, p in parameters.items()}, optimizer.state_dict()


def views(ranks, layout):
    return [rank[layout] for rank in ranks if layout in rank]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_state_and_every_norm_equal_those_of_one_process(ranks, alone, layout):
    columns, parameters, state = alone
    for seen in views(ranks, layout):
        for got, expected in zip(seen["columns"], columns, strict=True):
            assert got == pytest.approx(expected, rel=1e-9)
        for name, parameter in parameters.items():
            torch.testing.assert_close(seen["parameters"][name], parameter, rtol=1e-6, atol=1e-7)
        for name, tensor in state.items():
            torch.testing.assert_close(seen["state"][name], tensor, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_reports_the_very_same_numbers(ranks, layout):
    first, *others = views(ranks, layout)
    for other in others:
        assert other["columns"] == first["columns"]
        assert all(torch.equal(other["parameters"][name], first["parameters"][name]) for name in first["parameters"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nan_on_one_rank_is_refused_or_skipped_by_all_and_changes_nothing(ranks, layout):
    for seen in views(ranks, layout):
        assert "gradient norm is nan" in seen["refusal"]
        assert seen["skip"]["skipped"] == 1
        assert all(torch.equal(seen["after"][name], seen["parameters"][name]) for name in seen["parameters"])
        counted = {**seen["state"], "skipped_in_a_row": torch.tensor(1)}
        assert all(torch.equal(seen["final_state"][name], counted[name]) for name in counted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_is_restored_bit_for_bit_from_shards_and_from_full_tensors(ranks, layout):
    for seen in views(ranks, layout):
        for state in seen["again"]:
            assert set(state) == set(seen["final_state"])
            assert all(torch.equal(state[name], seen["final_state"][name]) for name in state)


def test_the_reference_takes_the_same_steps(alone):
    """Ties the one-process run to plain float64 arithmetic."""
    module = torch.nn.Module()
    for name, value in values(0).items():
        module.register_parameter(name, torch.nn.Parameter(value))
    trainer = ReferenceTrainer(module)
    columns, parameters, _ = alone
    for number, args in enumerate(STEPS):
        for name, gradient in values(number + 1).items():
            trainer.parameters[name].grad = gradient.double()
        assert trainer.optim_step(args) == pytest.approx(columns[number], rel=1e-5)
    for name, parameter in parameters.items():
        torch.testing.assert_close(trainer.parameters[name].detach().float(), parameter, rtol=1e-5, atol=1e-6)

"""What metrics are worth: reduced as declared, over the tokens of the loss, however the work was cut."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tinsmith.actors.metrics import Catalogue
from tinsmith.bus.protocol.envelope import Kind
from tinsmith.bus.protocol.errors import MetricError, NonFinite

FB = Kind.FORWARD_BACKWARD
PLAN = {"tokens_computed": 400.0, "padding_tokens": 40.0, "micro_batches": 3.0}


def test_a_token_mean_is_weighted_by_tokens_not_by_datums(builtin: Catalogue) -> None:
    rows = {"loss": np.array([100 * 2.0, 900 * 0.5]), "num_tokens": np.array([100.0, 900.0])}
    metrics = builtin.reduce(FB, rows).metrics
    assert metrics["loss:mean"] == 0.65
    assert metrics["loss:sum"] == 650.0
    assert metrics["num_tokens:sum"] == 1000.0


def test_every_builtin_metric_equals_its_value_over_all_tokens_at_once(builtin: Catalogue, make_batch) -> None:
    batch = make_batch([5, 0, 17, 1, 40], seed=1)
    gap = batch.tokens
    metrics = builtin.reduce(FB, batch.rows, PLAN).metrics
    expected = {
        "loss:sum": -gap.sum(),
        "loss:mean": -gap.mean(),
        "total_loss:sum": -gap.sum(),
        "pg_loss:sum": -np.exp(gap).sum(),
        "entropy_loss:sum": np.abs(gap).sum(),
        "entropy:mean": np.abs(gap).mean(),
        "num_tokens:sum": 63,
        "ratio:mean": np.exp(gap).mean(),
        "ratio:max": np.exp(gap).max(),
        "ratio:min": np.exp(gap).min(),
        "clip_fraction:mean": (np.abs(gap) > 0.2).mean(),
        "kl_k1:mean": -gap.mean(),
        "kl_k3:mean": (np.expm1(gap) - gap).mean(),
        "logprob_gap:mean": gap.mean(),
        "logprob_gap:max": gap.max(),
        "logprob_gap:std": gap.std(),
        "sequences:sum": 5,
        "tokens:sum": 78,
        "tokens_computed:sum": 400,
        "padding_share:mean": 0.1,
        "micro_batches:sum": 3,
        "logprob_gap_squares:sum": (gap**2).sum(),
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-12)


def test_forward_publishes_the_same_keys_and_values_as_forward_backward(builtin: Catalogue, make_batch) -> None:
    rows = make_batch([4, 9]).rows
    assert builtin.reduce(Kind.FORWARD, rows, PLAN) == builtin.reduce(FB, rows, PLAN)


def test_a_sum_does_not_depend_on_how_many_ranks_made_the_rows(builtin: Catalogue, make_batch) -> None:
    whole = make_batch([3, 8, 0, 21, 2, 5, 13], seed=2).rows
    expected = builtin.reduce(FB, whole, PLAN)
    for ranks in (1, 2, 3, 7):
        owners = [list(range(rank, 7, ranks)) for rank in range(ranks)]
        gathered = {name: np.concatenate([column[mine] for mine in owners]) for name, column in whole.items()}
        back = np.argsort(np.concatenate(owners))
        rows = {name: gathered[name][back] for name in reversed(list(gathered))}
        assert builtin.reduce(FB, rows, PLAN) == expected


def test_a_reduction_is_declared_and_never_read_from_the_name(overlay: Callable[[str], Path]) -> None:
    text = '[minibatch_loss]\nreduce = "sum"\nsource = "part"\n[max_of_mean]\nreduce = "min"\nsource = "part"\n'
    metrics = Catalogue.load([overlay(text)]).reduce(FB, {"part": [3.0, 1.0, 2.0]}).metrics
    assert metrics == {"minibatch_loss:sum": 6.0, "max_of_mean:min": 1.0}


def test_a_max_is_the_largest_not_the_average_nor_the_last(builtin: Catalogue) -> None:
    rows = {"ratio_max": [1.0, 7.0, 2.0], "num_tokens": [1.0, 1.0, 1.0]}
    assert builtin.reduce(FB, rows).metrics["ratio:max"] == 7.0


def test_each_mean_has_its_own_weight(overlay: Callable[[str], Path]) -> None:
    text = (
        '[reward]\nreduce = "mean"\nsource = "reward_sum"\nweight = "sequences"\n'
        '[gap]\nreduce = "mean"\nsource = "gap_sum"\nweight = "num_tokens"\n'
    )
    rows = {"reward_sum": [1.0, 0.0], "gap_sum": [8.0, 2.0], "sequences": [1.0, 1.0], "num_tokens": [3.0, 7.0]}
    metrics = Catalogue.load([overlay(text)]).reduce(FB, rows).metrics
    assert metrics["reward:mean"] == 0.5
    assert metrics["gap:mean"] == 1.0


def test_a_mean_is_published_with_its_sum_and_its_count(builtin: Catalogue, make_batch) -> None:
    metrics = builtin.reduce(FB, make_batch([4, 0, 9]).rows, PLAN).metrics
    means = [output for output in builtin.outputs[FB] if output.apply == "mean"]
    assert len(means) >= 7
    for output in means:
        total = metrics[f"{output.metric}:sum"]
        assert metrics[output.key] == total / metrics[f"{output.weight}:sum"]


def test_a_masked_datum_takes_no_part_in_a_minimum_or_maximum(builtin: Catalogue) -> None:
    rows = {"ratio_min": [0.5, 0.0], "ratio_max": [0.8, 9.0], "num_tokens": [3.0, 0.0]}
    metrics = builtin.reduce(FB, rows).metrics
    assert (metrics["ratio:min"], metrics["ratio:max"]) == (0.5, 0.8)


def test_an_infinite_maximum_of_a_token_that_took_part_is_published_and_flagged(builtin: Catalogue) -> None:
    reduced = builtin.reduce(FB, {"ratio_min": [np.inf], "ratio_max": [np.inf], "num_tokens": [1.0]})
    assert reduced.metrics["ratio:min"] == reduced.metrics["ratio:max"] == np.inf
    assert reduced.flags == ("ratio:max", "ratio:min")


def test_a_fully_masked_datum_takes_no_part_in_a_mean(builtin: Catalogue, make_batch) -> None:
    with_masked, without = make_batch([5, 0, 9, 0], seed=3), make_batch([5, 9], seed=3)
    first, second = builtin.reduce(FB, with_masked.rows).metrics, builtin.reduce(FB, without.rows).metrics
    differing = {key for key in first if first[key] != second[key]}
    assert differing == {"sequences:sum", "tokens:sum"}


def test_a_fully_masked_batch_has_sums_of_zero_and_no_mean_extreme_or_std(builtin: Catalogue, make_batch) -> None:
    reduced = builtin.reduce(FB, make_batch([0, 0]).rows)
    assert {key.rpartition(":")[2] for key in reduced.metrics} == {"sum"}
    assert reduced.metrics["loss:sum"] == reduced.metrics["num_tokens:sum"] == 0.0
    assert reduced.metrics["logprob_gap_squares:sum"] == 0.0
    assert reduced.flags == ()


def test_a_metric_of_an_absent_column_is_absent_not_zero(builtin: Catalogue) -> None:
    metrics = builtin.reduce(FB, {"loss": [1.0], "num_tokens": [2.0]}).metrics
    assert set(metrics) == {"loss:sum", "loss:mean", "total_loss:sum", "num_tokens:sum"}


def test_the_first_source_column_present_wins(builtin: Catalogue) -> None:
    both = builtin.reduce(FB, {"final_loss": [9.0], "loss": [1.0]})
    other = builtin.reduce(FB, {"final_loss": [9.0]})
    assert both.metrics["total_loss:sum"] == 1.0
    assert other.metrics == {"total_loss:sum": 9.0}
    assert both.unmapped == other.unmapped == ()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_stays_so_and_is_flagged_and_counted(make_batch, bad: float) -> None:
    catalogue = Catalogue.load()
    rows = make_batch([2, 3]).rows
    rows["loss"] = np.array([1.0, bad])
    reduced = catalogue.reduce(FB, rows)
    for key in ("loss:sum", "loss:mean", "total_loss:sum"):
        assert reduced.metrics[key] == pytest.approx(bad, nan_ok=True)
        assert catalogue.non_finite[key] == 1
    assert reduced.flags == ("loss:sum", "loss:mean", "total_loss:sum")
    assert np.isfinite(reduced.metrics["entropy_loss:sum"])


@pytest.mark.parametrize("column", ["ratio_max", "ratio_min", "logprob_gap_mean", "logprob_gap_m2"])
def test_nan_survives_extremes_and_moments(builtin: Catalogue, make_batch, column: str) -> None:
    rows = make_batch([2, 3, 4]).rows
    rows[column][1] = np.nan
    reduced = builtin.reduce(FB, rows)
    assert any(np.isnan(reduced.metrics[key]) for key in reduced.flags)
    assert set(reduced.flags) == {key for key, value in reduced.metrics.items() if np.isnan(value)}
    assert reduced.flags


def test_opposite_infinities_make_nan_and_overflow_makes_infinity(builtin: Catalogue) -> None:
    assert np.isnan(builtin.reduce(FB, {"pg_loss": [np.inf, -np.inf]}).metrics["pg_loss:sum"])
    assert builtin.reduce(FB, {"pg_loss": [1e308, 1e308]}).metrics["pg_loss:sum"] == np.inf


def test_a_metric_declared_fail_refuses_a_value_that_is_not_finite(overlay: Callable[[str], Path]) -> None:
    text = '[total_loss]\noverride = true\nreduce = "sum"\nsource = "loss"\nnon_finite = "fail"\n'
    catalogue = Catalogue.load([overlay(text)])
    with pytest.raises(NonFinite, match=r"total_loss:sum.*nan") as caught:
        catalogue.reduce(FB, {"loss": [np.nan]})
    assert caught.value.field == "total_loss:sum"
    assert catalogue.non_finite["total_loss:sum"] == 1


def test_a_metric_declared_error_refuses_a_missing_column(overlay: Callable[[str], Path]) -> None:
    text = '[reward]\nreduce = "sum"\nsource = ["reward", "score"]\nmissing = "error"\n'
    catalogue = Catalogue.load([overlay(text)])
    with pytest.raises(MetricError, match=r"reward:sum.*'reward', 'score'"):
        catalogue.reduce(FB, {"loss": [1.0]})
    assert catalogue.reduce(FB, {"score": [1.0]}).metrics == {"reward:sum": 1.0}


def test_a_column_that_no_metric_reads_is_named_and_counted() -> None:
    catalogue = Catalogue.load()
    for _ in range(2):
        reduced = catalogue.reduce(FB, {"loss": [1.0], "my_column": [2.0]}, {"my_scalar": 1.0})
    assert reduced.unmapped == ("my_column", "my_scalar")
    assert catalogue.unmapped == {"my_column": 2, "my_scalar": 2}


def test_columns_of_unequal_length_are_refused(builtin: Catalogue) -> None:
    with pytest.raises(MetricError, match=r"'entropy' has 1 values where 'loss' has 2"):
        builtin.reduce(FB, {"loss": [1.0, 2.0], "entropy": [1.0]})
    with pytest.raises(MetricError, match=r"shape \(1, 2\)"):
        builtin.reduce(FB, {"loss": [[1.0, 2.0]]})
    with pytest.raises(MetricError, match="'loss' came both"):
        builtin.reduce(FB, {"loss": [1.0]}, {"loss": 1.0})


def test_every_key_of_a_batch_has_exactly_one_colon_and_those_of_a_step_none(builtin: Catalogue, make_batch) -> None:
    metrics = builtin.reduce(FB, make_batch([3, 2]).rows, PLAN).metrics
    assert all(key.count(":") == 1 for key in metrics)
    step = dict.fromkeys(
        ("grad_norm", "learning_rate", "param_norm", "update_norm", "clip_coef", "skipped", "step"), 0.25
    )
    reduced = builtin.reduce(Kind.OPTIM_STEP, {}, step)
    assert reduced.metrics == step
    assert reduced.unmapped == ()


def test_a_kind_without_metrics_publishes_none_and_still_names_its_columns() -> None:
    reduced = Catalogue.load().reduce(Kind.SAVE, {}, {"bytes": 3.0})
    assert reduced.metrics == {}
    assert reduced.unmapped == ("bytes",)


def test_std_is_exact_where_squares_would_cancel(builtin: Catalogue) -> None:
    rng = np.random.default_rng(5)
    parts = [rng.normal(1e8, 1e-3, size=n) for n in (7, 30, 1, 200)]
    rows = {
        "num_tokens": [float(len(p)) for p in parts],
        "logprob_gap_mean": [p.mean() for p in parts],
        "logprob_gap_m2": [((p - p.mean()) ** 2).sum() for p in parts],
    }
    std = builtin.reduce(FB, rows).metrics["logprob_gap:std"]
    assert std == pytest.approx(np.concatenate(parts).std(), rel=1e-4)


def test_last_slack_unique_and_hash2(overlay: Callable[[str], Path]) -> None:
    text = "".join(
        f'[{name}]\nreduce = "{name}"\nsource = "x"\nnon_finite = "fail"\n'
        for name in ("last", "slack", "unique", "hash2")
    )
    catalogue = Catalogue.load([overlay(text)])
    assert catalogue.reduce(FB, {"x": [3.0, 5.0, 3.0]}).metrics == {
        "last:last": 3.0,
        "last_last:unique": 3.0,
        "slack:slack": 11 / 3,
        "unique:unique": 3.0,
        "unique:unique_1": 5.0,
        "hash2:hash2": 11.0,
    }
    top = float(2**53 - 1)
    assert catalogue.reduce(FB, {"x": [top, 3.0]}).metrics["hash2:hash2"] == 2.0
    for bad in (0.5, -1.0, float(2**53)):
        with pytest.raises(MetricError, match="whole number") as caught:
            catalogue.reduce(FB, {"x": [1.0, bad]})
        assert (caught.value.datum, caught.value.field) == (1, "x")
    with pytest.raises(NonFinite, match="no hash"):
        catalogue.reduce(FB, {"x": [np.nan]})


def test_forty_metrics_of_256_datums_are_reduced_in_about_a_millisecond(overlay: Callable[[str], Path]) -> None:
    extra = "".join(f'[m{i}]\nreduce = "sum"\nsource = "c{i}"\n' for i in range(12))
    catalogue = Catalogue.load([overlay(extra)])
    columns = {column for output in catalogue.outputs[FB] for column in output.columns()} - set(PLAN)
    rows = {name: np.random.default_rng(7).random(256) + 0.5 for name in columns}
    assert len(catalogue.reduce(FB, rows, PLAN).metrics) >= 40

    def seconds() -> float:
        start = time.perf_counter()
        catalogue.reduce(FB, rows, PLAN)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(30)) < 3e-3  # well below 1 ms on an idle core; room for a busy one

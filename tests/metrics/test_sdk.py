"""What the official Tinker SDK makes of our keys when it splits a batch into chunks and combines their metrics."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from tinker.lib.chunked_fwdbwd_helpers import REDUCE_MAP, combine_fwd_bwd_output_results
from tinker.types import ForwardBackwardOutput

from tinsmith.actors.metrics import Catalogue
from tinsmith.bus.protocol.envelope import Kind

FB = Kind.FORWARD_BACKWARD

NOT_COMBINED = {
    "loss:mean": "the SDK weighs means by datums, not by tokens; loss:sum / num_tokens:sum is exact",
    "entropy:mean": "as loss:mean; entropy:sum / num_tokens:sum is exact",
    "ratio:mean": "as loss:mean; ratio:sum / num_tokens:sum is exact",
    "clip_fraction:mean": "as loss:mean; clip_fraction:sum / num_tokens:sum is exact",
    "kl_k1:mean": "as loss:mean; kl_k1:sum / num_tokens:sum is exact",
    "kl_k3:mean": "as loss:mean; kl_k3:sum / num_tokens:sum is exact",
    "logprob_gap:mean": "as loss:mean; logprob_gap:sum / num_tokens:sum is exact",
    "padding_share:mean": "as loss:mean; padding_share:sum / tokens_computed:sum is exact",
    "logprob_gap:std": "the SDK drops the suffix; logprob_gap_squares:sum, logprob_gap:sum, num_tokens:sum are exact",
    "logprob_gap_std:unique": "the SDK lists one value a chunk, the first under the key itself",
}
"""Published keys whose value after the SDK's combination is not that of the unsplit batch, and why."""

SIZES = [(12,), (1, 11), (4, 4, 4), (1, 2, 3, 6), (1,) * 12]


def _plan(rows: dict[str, np.ndarray]) -> dict[str, float]:
    """Scalars that add up over chunks, as those of real plans of these chunks would."""
    datums = float(len(rows["loss"]))
    return {"tokens_computed": 50 * datums, "padding_tokens": 2 * datums, "micro_batches": datums}


def _combine(catalogue: Catalogue, rows: dict[str, np.ndarray], sizes: tuple[int, ...]) -> dict[str, float]:
    chunks, start = [], 0
    for size in sizes:
        chunk = {name: column[start : start + size] for name, column in rows.items()}
        metrics = catalogue.reduce(FB, chunk, _plan(chunk)).metrics
        chunks.append(
            ForwardBackwardOutput(loss_fn_output_type="", loss_fn_outputs=[{} for _ in range(size)], metrics=metrics)
        )
        start += size
    return dict(combine_fwd_bwd_output_results(chunks).metrics)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_chunks_combined_by_the_sdk_equal_the_unsplit_batch(builtin: Catalogue, make_batch, sizes) -> None:
    rows = make_batch([3, 9, 1, 30, 7, 2, 2, 14, 5, 60, 4, 8], seed=4).rows
    whole = builtin.reduce(FB, rows, _plan(rows)).metrics
    combined = _combine(builtin, rows, sizes)
    exact = set(whole) - set(NOT_COMBINED)
    assert {key: combined[key] for key in exact} == pytest.approx({key: whole[key] for key in exact}, rel=1e-12)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_what_the_sdk_cannot_combine_follows_exactly_from_what_it_can(builtin: Catalogue, make_batch, sizes) -> None:
    rows = make_batch([3, 9, 1, 30, 7, 2, 2, 14, 5, 60, 4, 8], seed=4).rows
    whole = builtin.reduce(FB, rows, _plan(rows)).metrics
    combined = _combine(builtin, rows, sizes)
    for output in builtin.outputs[FB]:
        if output.apply == "mean":
            mean = combined[f"{output.metric}:sum"] / combined[f"{output.weight}:sum"]
            assert mean == pytest.approx(whole[output.key], rel=1e-12)
    count = combined["num_tokens:sum"]
    mean = combined["logprob_gap:sum"] / count
    std = sqrt(combined["logprob_gap_squares:sum"] / count - mean * mean)
    assert std == pytest.approx(whole["logprob_gap:std"], rel=1e-9)


def test_every_key_not_combined_is_one_that_is_published_and_really_differs(builtin: Catalogue, make_batch) -> None:
    rows = make_batch([3, 9, 1, 30, 7, 2, 2, 14, 5, 60, 4, 8], seed=4).rows
    whole = builtin.reduce(FB, rows, _plan(rows)).metrics
    combined = _combine(builtin, rows, (1, 11))
    differing = {key for key in whole if combined.get(key) != pytest.approx(whole[key], rel=1e-12)}
    # Here every chunk has the same share of padding, so its mean happens to survive.
    assert differing == set(NOT_COMBINED) - {"padding_share:mean"}


def test_one_chunk_reaches_the_user_whole_but_for_suffixes_the_sdk_drops(builtin: Catalogue, make_batch) -> None:
    rows = make_batch([3, 9, 1]).rows
    whole = builtin.reduce(FB, rows, _plan(rows)).metrics
    combined = _combine(builtin, rows, (3,))
    assert combined == pytest.approx({key: value for key, value in whole.items() if key != "logprob_gap:std"})
    assert combined["logprob_gap_std:unique"] == whole["logprob_gap:std"]


def test_a_fully_masked_chunk_changes_no_sum_and_every_sum_is_on_every_chunk(builtin: Catalogue, make_batch) -> None:
    rows = make_batch([0, 3, 0, 5], seed=6).rows
    whole = builtin.reduce(FB, rows, _plan(rows)).metrics
    combined = _combine(builtin, rows, (1, 1, 1, 1))
    sums = {key for key in whole if key.endswith(":sum")}
    assert {key: combined[key] for key in sums} == pytest.approx({key: whole[key] for key in sums})
    assert "ratio:min" not in combined


def test_nan_in_one_chunk_stays_nan_after_combination(builtin: Catalogue, make_batch) -> None:
    rows = make_batch([2, 2, 2]).rows
    rows["loss"][1] = np.nan
    assert np.isnan(_combine(builtin, rows, (1, 1, 1))["total_loss:sum"])


def test_every_published_suffix_is_known_to_the_sdk_or_accompanied_by_one_that_is(builtin: Catalogue) -> None:
    keys = {output.key for output in builtin.outputs[FB]}
    for key in keys:
        name, suffix = key.split(":")
        assert suffix in REDUCE_MAP or f"{name}_{suffix}:unique" in keys


def test_slack_unique_and_hash2_combine_as_the_sdk_means_them(overlay: Callable[[str], Path]) -> None:
    text = (
        '[load]\nreduce = "slack"\nsource = "seconds"\n'
        '[digest]\nreduce = "hash2"\nsource = "hash"\nnon_finite = "fail"\n'
        '[policy]\nreduce = "unique"\nsource = "version"\n[seen]\nreduce = "last"\nsource = "version"\n'
    )
    catalogue = Catalogue.load([overlay(text)])
    rows = {
        "loss": np.zeros(5),
        "seconds": np.array([1.0, 1.0, 2.0, 2.0, 3.0]),
        "hash": np.array([2.0**40, 7.0, 11.0, 2.0**41, 1.0]),
        "version": np.array([4.0, 4.0, 5.0, 5.0, 5.0]),
    }
    combined = _combine(catalogue, rows, (2, 2, 1))
    assert combined["load:slack"] == pytest.approx(3.0 - 1.8)
    assert combined["digest:hash2"] == catalogue.reduce(FB, rows).metrics["digest:hash2"]
    assert [combined[f"policy:unique{n}"] for n in ("", "_1", "_2")] == [4.0, 5.0, 5.0]
    assert [combined[f"seen_last:unique{n}"] for n in ("", "_1", "_2")] == [4.0, 5.0, 5.0]

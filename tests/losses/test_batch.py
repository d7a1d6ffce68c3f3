"""A batch with one wrong datum is refused whole, with the datum and the field; a good one is laid out right."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from reference.cases import LOSSES, POLICY, random_batch

from tinsmith.actors.engine.batch import collate, validate_batch
from tinsmith.actors.engine.losses.registry import LossRegistry
from tinsmith.bus.protocol.datum import Datum, pack_datums, unpack_datums
from tinsmith.bus.protocol.errors import InvalidDatum, InvalidInput, SequenceTooLong

REGISTRY = LossRegistry.builtin()
VOCAB, CONTEXT = 20, 8


def check(data, loss="cross_entropy", config=None):
    validate_batch(data, REGISTRY.get(loss), vocab_size=VOCAB, context=CONTEXT, config=config)


def refused(data, loss="cross_entropy", kind=InvalidDatum, config=None):
    with pytest.raises(kind) as caught:
        check(data, loss, config)
    return caught.value


def good(loss="cross_entropy"):
    return random_batch(0, (4, 3), VOCAB, loss)


def second(loss="cross_entropy", tokens=None, without=(), **changed):
    """A good batch whose second datum (3 tokens) is changed."""
    first, other = good(loss)
    inputs = {name: value for name, value in other.inputs.items() if name not in without} | changed
    return [first, Datum(other.tokens if tokens is None else tokens, inputs)]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_good_batch_passes_as_made_and_as_it_comes_off_the_wire(loss):
    check(good(loss), loss)
    check(unpack_datums(pack_datums(good(loss))[0]), loss)


def test_an_empty_batch_is_refused():
    assert refused([], kind=InvalidInput).field == "data"


def test_an_empty_sequence_is_refused():
    error = refused([*good(), Datum([], {"target_tokens": [], "weights": []})])
    assert (error.datum, error.field) == (2, "tokens")


def test_a_sequence_over_the_context_is_refused_with_datum_length_and_limit_and_never_cut():
    error = refused([*good(), *random_batch(1, (9,), VOCAB, "cross_entropy")], kind=SequenceTooLong)
    assert (error.datum, error.field) == (2, "tokens")
    assert "9 tokens" in error.message
    assert "8" in error.message
    check([*good(), *random_batch(1, (8,), VOCAB, "cross_entropy")])


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
def test_a_token_or_target_outside_the_vocabulary_is_refused(token):
    error = refused(second(tokens=[1, token, 2]))
    assert (error.datum, error.field) == (1, "tokens")
    assert f"position 1 holds {token}" in error.message
    error = refused(second(target_tokens=[1, 2, token]))
    assert (error.datum, error.field) == (1, "target_tokens")
    assert f"position 2 holds {token}" in error.message


def test_a_target_outside_the_vocabulary_is_refused_at_weight_0_too():
    assert refused(second(target_tokens=[1, 2, -100], weights=[1.0, 1.0, 0.0])).field == "target_tokens"


@pytest.mark.parametrize("loss", LOSSES)
def test_a_missing_input_is_refused(loss):
    for name in ("target_tokens", *REGISTRY.get(loss).required):
        error = refused(second(loss, without=(name,)), loss)
        assert (error.datum, error.field) == (1, name)
        assert name in error.remedy


@pytest.mark.parametrize("loss", LOSSES)
def test_an_unknown_input_is_refused(loss):
    error = refused(second(loss, advantage=[1.0, 1.0, 1.0]), loss)
    assert (error.datum, error.field) == (1, "advantage")


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("length", [0, 2, 4])
def test_an_input_of_another_length_is_refused_never_cut_or_filled(loss, length):
    for name in good(loss)[0].inputs:
        error = refused(second(loss, **{name: np.ones(length, good(loss)[0].inputs[name].dtype)}), loss)
        assert (error.datum, error.field) == (1, name)
        assert f"got {length} values, expected 3" in error.message


def test_an_optional_input_in_some_datums_only_is_refused():
    error = refused(second(without=("weights",)))
    assert (error.datum, error.field) == (1, "weights")
    assert refused(second("ppo", mask=[1.0, 0.0, 1.0]), "ppo").field == "mask"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused(bad):
    error = refused(second(weights=[1.0, bad, 1.0]))
    assert (error.datum, error.field) == (1, "weights")
    assert "position 1" in error.message
    for loss in POLICY:
        for name in REGISTRY.get(loss).required:
            error = refused(second(loss, **{"advantages": [1.0, 1.0, 1.0], name: [1.0, bad, 1.0]}), loss)
            assert (error.datum, error.field) == (1, name), loss


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_sampler_logprob_at_a_token_without_loss_may_be_anything(bad):
    check(second("ppo", advantages=[1.0, 0.0, 1.0], logprobs=[-1.0, bad, -1.0]), "ppo")
    dro = second("dro", advantages=[1.0, 0.0, 1.0], logprobs=[-1.0, bad, -1.0])
    assert refused(dro, "dro").field == "logprobs", "dro reads it at every token"
    averaged = {"logprobs": [-1.0, bad, -1.0], "sequence_ratio_mask": [1.0, 1.0, 1.0], "advantages": [1.0, 0.0, 1.0]}
    assert refused(second("gspo", **averaged), "gspo").field == "logprobs", "the sequence ratio reads it"


def test_many_targets_a_token_are_for_losses_that_take_them_and_have_one_shape():
    wide = random_batch(0, (4, 3), VOCAB, "cross_entropy", k=2)
    check(wide)
    assert refused([wide[0], good()[1]]).field == "target_tokens"
    assert refused([good()[0], wide[1]]).field == "target_tokens"
    assert refused([wide[0], *random_batch(0, (3,), VOCAB, "cross_entropy", k=3)]).field == "target_tokens"
    flat = Datum(wide[1].tokens, {**wide[1].inputs, "weights": [1.0, 1.0, 1.0]})
    assert refused([wide[0], flat]).field == "weights"
    empty = Datum([1, 2], {"target_tokens": np.zeros((2, 0), np.int64)})
    assert refused([empty]).field == "target_tokens"
    for loss in POLICY:
        error = refused(second(loss, target_tokens=np.zeros((3, 2), np.int64)), loss)
        assert (error.datum, error.field) == (1, "target_tokens")
        batch = [Datum(d.tokens, {**d.inputs, "target_tokens": np.zeros((len(d), 2), np.int64)}) for d in good(loss)]
        assert refused(batch, loss).field == "target_tokens"


def test_a_bad_value_among_k_is_found():
    wide = random_batch(0, (4, 3), VOCAB, "cross_entropy", k=2)
    weights = np.ones((3, 2), np.float32)
    weights[2, 1] = np.nan
    assert refused([wide[0], Datum(wide[1].tokens, {**wide[1].inputs, "weights": weights})]).field == "weights"
    targets = np.zeros((3, 2), np.int64)
    targets[2, 0] = VOCAB
    error = refused([wide[0], Datum(wide[1].tokens, {**wide[1].inputs, "target_tokens": targets})])
    assert (error.datum, error.field) == (1, "target_tokens")


def test_inputs_of_the_wrong_kind_are_refused():
    class Raw:
        def __init__(self, tokens, inputs):
            self.tokens, self.inputs = tokens, inputs

    ints, floats = np.array([1, 2]), np.array([1.0, 2.0])
    assert refused([Raw(floats, {"target_tokens": ints})]).field == "tokens"
    assert refused([Raw(ints, {"target_tokens": floats})]).field == "target_tokens"
    assert refused([Raw(ints, {"target_tokens": ints, "weights": ints})]).field == "weights"


def test_a_mask_that_is_not_0_or_1_is_refused():
    data = [Datum(d.tokens, {**d.inputs, "mask": [1.0] * len(d)}) for d in good("ppo")]
    check(data, "ppo")
    data[1].inputs["mask"][1] = 0.5
    for loss in ("importance_sampling", "ppo", "cispo", "dro"):
        error = refused(data, loss)
        assert (error.datum, error.field) == (1, "mask")


def test_per_token_thresholds_out_of_order_are_refused_against_each_other_and_the_config():
    def batch(**inputs):
        return [
            Datum(d.tokens, {**d.inputs, **{name: [value] * len(d) for name, value in inputs.items()}})
            for d in good("ppo")
        ]

    check(batch(clip_low_threshold=0.5, clip_high_threshold=2.0), "ppo")
    error = refused(batch(clip_low_threshold=2.0, clip_high_threshold=0.5), "ppo")
    assert (error.datum, error.field) == (0, "clip_low_threshold")
    assert refused(batch(clip_low_threshold=-0.5), "ppo").field == "clip_low_threshold"
    assert refused(batch(clip_high_threshold=0.5), "ppo").field == "clip_high_threshold"
    check(batch(clip_high_threshold=0.5), "ppo", {"clip_low_threshold": 0.1, "clip_high_threshold": 1.2})


def test_a_sequence_ratio_over_no_token_is_refused_unless_the_datum_bears_no_loss():
    error = refused(second("gspo", sequence_ratio_mask=[0.0, 0.0, 0.0], advantages=[0.0, 1.0, 0.0]), "gspo")
    assert (error.datum, error.field) == (1, "sequence_ratio_mask")
    check(second("gspo", sequence_ratio_mask=[0.0, 0.0, 0.0], advantages=[0.0, 0.0, 0.0]), "gspo")


def test_rows_are_right_padded_and_carry_their_place_in_the_batch():
    data = random_batch(0, (2, 5, 3), VOCAB, "ppo")
    batch = collate(data, [2, 1])
    assert (batch.lengths, batch.indices) == ((3, 5), (2, 1))
    assert batch.mask.tolist() == [[True] * 3 + [False] * 2, [True] * 5]
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    for row, index in enumerate(batch.indices):
        n = len(data[index])
        assert batch.tokens[row].tolist() == [*data[index].tokens.tolist(), *[0] * (5 - n)]
        assert batch.targets[row].tolist() == [*data[index].inputs["target_tokens"].tolist(), *[0] * (5 - n)]
        for name, column in batch.inputs.items():
            assert column.dtype == torch.float32
            assert column[row].tolist() == [*data[index].inputs[name].tolist(), *[0.0] * (5 - n)]


def test_many_targets_are_padded_by_position_only():
    data = random_batch(0, (2, 3), VOCAB, "cross_entropy", k=4)
    batch = collate(data, [0, 1])
    assert batch.targets.shape == batch.inputs["weights"].shape == (2, 3, 4)
    assert batch.targets[0, 2].tolist() == [0, 0, 0, 0]
    assert batch.targets[1].tolist() == data[1].inputs["target_tokens"].tolist()
    assert collate(data, ()).targets.shape == (1, 1, 4)


def test_a_batch_of_131072_tokens_is_validated_in_milliseconds():
    data = random_batch(0, (512,) * 256, 32000, "ppo")
    best = math.inf
    for _ in range(7):
        start = time.perf_counter()
        validate_batch(data, REGISTRY.get("ppo"), vocab_size=32000, context=512)
        best = min(best, time.perf_counter() - start)
    # About 3 ms on an idle core; the margin is for a busy machine. A look at each token in Python takes 50 times that.
    assert best < 0.02

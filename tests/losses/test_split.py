"""A batch gives the same rows and gradients however it is cut into micro-batches and however far rows are padded."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.cases import CONFIGS, LOSSES, random_batch

from tinsmith.actors.engine.batch import collate, validate_batch
from tinsmith.actors.engine.losses.registry import LossRegistry, TokenInputs, evaluate

REGISTRY = LossRegistry.builtin()
VOCAB = 30


@settings(max_examples=40, deadline=None)
@given(
    loss=st.sampled_from(LOSSES),
    seed=st.integers(0, 2**16),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 3), min_size=6, max_size=6),
)
def test_rows_and_gradients_do_not_depend_on_the_cut(loss, seed, lengths, cuts):
    data = random_batch(seed, tuple(lengths), VOCAB, loss)
    validate_batch(data, REGISTRY.get(loss), vocab_size=VOCAB, context=12)
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    config = REGISTRY.parse_config(loss, CONFIGS[loss])

    def run(groups):
        """A table of logits stands for the model: token -> distribution of the next."""
        logits = table.clone().requires_grad_()
        rows = {}
        for group in groups:
            batch = collate(data, group)
            log = torch.log_softmax(logits[batch.tokens], -1)
            logprobs = log.gather(-1, batch.targets[..., None])[..., 0]
            entropy = -(log.exp() * log).sum(-1).detach()
            inputs = {name: value.double() for name, value in batch.inputs.items()}
            got = evaluate(REGISTRY.get(loss), TokenInputs(logprobs, entropy, inputs, batch.mask), config)
            got.total.backward()
            for row, index in enumerate(batch.indices):
                rows[index] = {name: column[row].item() for name, column in got.columns.items()}
        return rows, logits.grad

    groups = [[i for i in range(len(data)) if cuts[i] == part] for part in range(4)]
    rows, gradient = run(groups)
    whole, expected = run([list(range(len(data)))])
    singly, one_by_one = run([[i] for i in range(len(data))])
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(one_by_one, expected, rtol=1e-10, atol=1e-12)
    for index in range(len(data)):
        for name, value in whole[index].items():
            for other in (rows, singly):
                torch.testing.assert_close(other[index][name], value, rtol=1e-10, atol=1e-12, equal_nan=False)

"""A batch of datums: refused as a whole where one is wrong, then laid out as right-padded micro-batches.

Validation looks at the whole batch end to end, never datum by datum where values are concerned, and every rank reaches
the same verdict because every rank sees the same batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinsmith.actors.engine.losses.contract import SAMPLER, TARGETS, Columnar, Config, Loss
from tinsmith.bus.protocol.datum import Datum
from tinsmith.bus.protocol.errors import InvalidDatum, InvalidInput, SequenceTooLong

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class MicroBatch:
    """Some datums of a batch as right-padded rows, L the longest of them.

    tokens  int64 [rows, L], padding 0.
    targets int64 [rows, L] or [rows, L, K], padding 0.
    inputs  name -> float32 [rows, L] or [rows, L, K], padding 0.
    mask    bool [rows, L]: true where a token is.
    lengths tokens of each datum; indices: its place in the batch.

    Without datums it is one row of one padding token, so that the rank still runs and its collectives stay in step;
    rows beyond len(indices) belong to no datum.
    """

    tokens: Tensor
    targets: Tensor
    inputs: dict[str, Tensor]
    mask: Tensor
    lengths: tuple[int, ...]
    indices: tuple[int, ...]


def validate_batch(
    data: Sequence[Datum], loss: Loss, *, vocab_size: int, context: int, config: Config | None = None
) -> None:
    """Refuse the whole batch unless every datum is fit for this loss and model.

    `config` is the loss's complete config (its defaults when None); checks of per-token thresholds compare with it.
    A value that is not finite is refused, except a sampler log-prob at a token that bears no loss, which takes no part.
    Raises InvalidInput (empty batch), SequenceTooLong, InvalidDatum; each names the datum and the field.
    """
    if not data:
        raise InvalidInput("the batch holds no datum.", remedy="send at least one datum.", field="data")
    names = _check_shapes(data, loss, context)
    lengths = np.fromiter((len(datum.tokens) for datum in data), np.intp, len(data))
    inputs = {name: np.concatenate([item.inputs[name] for item in data]) for name in names if name != TARGETS}
    batch = Columnar(inputs, _bearing(loss, inputs, int(lengths.sum())), np.cumsum(lengths) - lengths)
    _check_vocabulary(np.concatenate([item.tokens for item in data]), batch, "tokens", vocab_size)
    _check_vocabulary(np.concatenate([item.inputs[TARGETS] for item in data]), batch, TARGETS, vocab_size)
    _check_finite(batch, loss)
    if loss.check is not None:
        defaults = {item.name: item.default for item in loss.config if item.default is not None}
        found = loss.check(batch, defaults if config is None else config)
        if found is not None:
            _refuse(found.datum, found.field, found.message, found.remedy)


def collate(
    data: Sequence[Datum], indices: Iterable[int], device: torch.device | str = "cpu", *, ignored: Sequence[str] = ()
) -> MicroBatch:
    """The datums of these indices as one micro-batch on the device, without the inputs that the loss ignores.

    The batch has been validated: all its datums have the same inputs of the same K.
    """
    chosen = tuple(indices)
    rows = [data[index] for index in chosen]
    lengths = tuple(len(row.tokens) for row in rows)
    # The shape of every tensor is taken from the batch, so an empty micro-batch has the names and K of the others.
    template = data[0].inputs
    height, width = max(len(rows), 1), max(lengths, default=1)
    mask = np.arange(width)[None, :] < np.array(lengths or (0,))[:, None]

    def padded(arrays: list[Array], like: Array, dtype: type[np.generic]) -> Tensor:
        out = np.zeros((height, width, *like.shape[1:]), dtype)
        if arrays:
            out[mask] = np.concatenate(arrays)
        return torch.from_numpy(out).to(device, non_blocking=True)

    return MicroBatch(
        tokens=padded([row.tokens for row in rows], data[0].tokens, np.int64),
        targets=padded([row.inputs[TARGETS] for row in rows], template[TARGETS], np.int64),
        inputs={
            name: padded([row.inputs[name] for row in rows], template[name], np.float32)
            for name in template
            if name != TARGETS and name not in ignored
        },
        mask=torch.from_numpy(mask).to(device, non_blocking=True),
        lengths=lengths,
        indices=chosen,
    )


def _check_shapes(data: Sequence[Datum], loss: Loss, context: int) -> tuple[str, ...]:
    """Names, kinds and shapes of every datum; returns the names that take part: target_tokens and the loss's inputs."""
    required = (TARGETS, *loss.required)
    known = {*required, *loss.optional}
    allowed = known.union(loss.ignored)
    takes = f"{loss.name} takes {', '.join(required)}" + (
        f" and optionally {', '.join(loss.optional)}" if loss.optional else ""
    )
    first = data[0].inputs
    names = tuple(name for name in (*required, *loss.optional) if name in first)
    like = first[TARGETS].shape[1:] if TARGETS in first else ()
    for index, datum in enumerate(data):
        length = len(datum.tokens)
        _check_tokens(index, datum.tokens, context)
        for name in required:
            if name not in datum.inputs:
                _refuse(index, name, f"loss {loss.name!r} needs the input {name!r}", f"{takes}.")
        for name in loss.optional:
            # A micro-batch has one set of inputs: what half of the datums have can't be told from what they lack.
            if (name in datum.inputs) != (name in first):
                other = f"datum 0 {'has' if name in first else 'lacks'} it"
                _refuse(index, name, f"only some datums have {name!r}: {other}", "give it in every datum or in none.")
        for name, values in datum.inputs.items():
            if name not in allowed:
                _refuse(index, name, f"loss {loss.name!r} does not know the input {name!r}", f"{takes}.")
            if name not in known:
                continue
            wanted = "iu" if name == TARGETS else "f"
            if values.dtype.kind not in wanted:
                kind = "integers" if name == TARGETS else "floats"
                _refuse(index, name, f"holds {values.dtype}, not {kind}", f"send {kind}.")
            if values.ndim == 0 or len(values) != length:
                got = len(values) if values.ndim else "a scalar"
                _refuse(index, name, f"got {got} values, expected {length}, one a token", "send equal lengths.")
            if values.shape[1:] != (like if name == TARGETS or loss.multi_target else ()) or values.ndim > 2:
                _refuse_shape(index, name, values, datum, loss, like)
        targets = datum.inputs[TARGETS]
        if targets.ndim == 2 and (not loss.multi_target or targets.shape[1] == 0):
            _refuse_shape(index, TARGETS, targets, datum, loss, like)
    return names


def _check_tokens(index: int, tokens: Array, context: int) -> None:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        _refuse(index, "tokens", f"holds {tokens.dtype} of shape {list(tokens.shape)}", "send integers [n].")
    if len(tokens) == 0:
        _refuse(index, "tokens", "the sequence is empty", "send at least one token.")
    if len(tokens) > context:
        raise SequenceTooLong(
            f"the sequence has {len(tokens)} tokens, over the model's context of {context}.",
            remedy="shorten or split it; it is never cut here.",
            datum=index,
            field="tokens",
        )


def _refuse_shape(index: int, name: str, values: Array, datum: Datum, loss: Loss, like: tuple[int, ...]) -> NoReturn:
    length = len(datum.tokens)
    if not loss.multi_target:
        expected = f"[{length}]; loss {loss.name!r} takes one target a token"
    elif name == TARGETS:
        expected = f"{[length, *like]} as in datum 0 (K at least 1)"
    else:
        expected = f"{[length, *like]}, the shape of target_tokens"
    _refuse(index, name, f"got shape {list(values.shape)}, expected {expected}", "send one shape in all of a batch.")


def _check_vocabulary(values: Array, batch: Columnar, name: str, vocab_size: int) -> None:
    """Targets are checked at every position, of whatever weight: a model can't look up what it does not have."""
    if values.min() >= 0 and values.max() < vocab_size:
        return
    at = int(_all_k((values >= 0) & (values < vocab_size)).argmin())
    _refuse(
        batch.datum(at),
        name,
        f"position {batch.offset(at)} holds {values[at]}, outside the vocabulary of {vocab_size}",
        f"send ids from 0 to {vocab_size - 1}.",
    )


def _check_finite(batch: Columnar, loss: Loss) -> None:
    for name, values in batch.inputs.items():
        # In float64 no sum of float32 overflows: it is finite if and only if all are.
        if math.isfinite(values.sum(dtype=np.float64)):
            continue
        fit = _all_k(np.isfinite(values))
        if name == SAMPLER:
            fit |= ~_takes_part(loss, batch)
        if not fit.all():
            at = int(fit.argmin())
            _refuse(
                batch.datum(at),
                name,
                f"position {batch.offset(at)} holds {values[at]}",
                "send finite numbers; a sampler log-prob may be anything only where no loss is borne.",
            )


def _bearing(loss: Loss, inputs: dict[str, Array], tokens: int) -> npt.NDArray[np.bool_]:
    """bool [tokens]: the rule of TokenInputs.bearing over the whole batch."""
    for name in loss.bearing:
        if name in inputs:
            return ~_all_k(inputs[name] == 0)
    return np.ones(tokens, dtype=np.bool_)


def _takes_part(loss: Loss, batch: Columnar) -> npt.NDArray[np.bool_]:
    """bool [tokens]: where the sampler's log-prob is read: tokens that bear loss or enter a mean of the sequence."""
    taken = batch.bearing
    for name in loss.averaging:
        taken = taken | (batch.inputs[name] != 0)
    return taken


def _all_k(values: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """bool [tokens]: true where it is for all of K."""
    return np.asarray(values.all(axis=1)) if values.ndim == 2 else values


def _refuse(datum: int, field: str, message: str, remedy: str) -> NoReturn:
    raise InvalidDatum(f"{message}.", remedy=remedy, datum=datum, field=field)

"""Keys and values of running sequences: one slot per row, each filled to its own length, and the masks that go with it.

Invariants of SlotCache: live rows are the slots 0..rows-1; row i holds its tokens at columns 0..length_i-1; what lies
right of a row's length is never attended to. Growth copies, in steps of a quarter; a decode step writes one column
per row and hands the attention views of the live prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from tinsmith.bus.protocol.errors import UnsupportedModel

KeyValue = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer."""
_CHUNK = 64
"""Columns are allocated in multiples of this."""


class _PositionedCache(Cache):  # type: ignore[misc]
    """What transformers asks of a cache to build its own masks: how many tokens lie before the query."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._past = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the query."""
        return self._past

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns that `update` will return, and the position of the first of them."""
        return self._past + query_length, 0


class PromptCache(_PositionedCache):
    """Keys and values of prompts in prefill: from column 0, right-padded to `length`, written chunk by chunk."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length
        self.layers_kv: list[KeyValue] = []

    def begin(self, offset: int) -> None:
        """The next forward holds the tokens from `offset` on."""
        self._past = offset

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> KeyValue:
        """Store the chunk [rows, heads, chunk, dim]; returns keys and values from column 0 to its end."""
        end = self._past + key.shape[2]
        if end == self._length and self._past == 0:
            self.layers_kv.append((key, value))
            return key, value
        if layer_idx == len(self.layers_kv):
            self.layers_kv.append(
                (
                    key.new_empty((*key.shape[:2], self._length, key.shape[3])),
                    value.new_empty((*value.shape[:2], self._length, value.shape[3])),
                )
            )
        keys, values = self.layers_kv[layer_idx]
        keys[:, :, self._past : end] = key
        values[:, :, self._past : end] = value
        return keys[:, :, :end], values[:, :, :end]

    def row(self, row: int, length: int) -> list[KeyValue]:
        """Views [heads, length, dim] of one row, per layer."""
        return [(k[row, :, :length], v[row, :, :length]) for k, v in self.layers_kv]


class SlotCache(_PositionedCache):
    """Keys and values of the rows that are decoding."""

    def __init__(self) -> None:
        super().__init__()
        self._layers_kv: list[KeyValue] = []
        self._rows = 0
        self._index: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self.slots, self.capacity = 0, 0
        self.ragged, self.longest = False, 0

    @staticmethod
    def columns(length: int) -> int:
        """Columns needed for rows of up to `length` tokens: a multiple of the chunk."""
        return -(-length // _CHUNK) * _CHUNK

    @property
    def nbytes(self) -> int:
        """Memory held, bytes."""
        return sum(k.nbytes + v.nbytes for k, v in self._layers_kv)

    def place(self, slot: int, source: Sequence[KeyValue], *, live: int, most: int) -> None:
        """Copy a prefilled prompt (per layer [heads, length, dim]) into slot `slot`, the first free one.

        live: longest live row, whose columns a growth must keep; most: slots the cache may ever need.
        """
        length = source[0][0].shape[1]
        if slot >= self.slots or length > self.capacity:
            slots = max(self.slots, min(max(slot + 1, 2 * self.slots), most))
            self._resize(source, slots, self.columns(max(length, live)), slot, live)
        for (keys, values), (k, v) in zip(self._layers_kv, source, strict=True):
            keys[slot, :, :length] = k
            values[slot, :, :length] = v

    def reserve(self, rows: int, length: int) -> None:
        """Make room for one more column: after this, `rows` rows of `length` tokens fit."""
        if length > self.capacity:
            self._resize(self._layers_kv, rows, self.columns(length + length // 4), rows, length - 1)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of one slot over another, to close the gap of a row that left."""
        for keys, values in self._layers_kv:
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def clear(self) -> None:
        """Give all memory back; no row may be live."""
        self._layers_kv = []
        self.slots, self.capacity = 0, 0

    def begin(self, positions: torch.Tensor, shortest: int, longest: int) -> None:
        """The next forward holds one token per live row, at `positions` int64 [rows], between the two given ones."""
        self._rows, self._past = positions.shape[0], longest
        self.ragged, self.longest = shortest != longest, longest
        if self.ragged:
            self._positions = positions
            self._index = torch.arange(self._rows, device=positions.device)

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> KeyValue:
        """Write one column per row from [rows, heads, 1, dim]; returns views of all live columns."""
        keys, values = self._layers_kv[layer_idx]
        if not self.ragged:
            keys[: self._rows, :, self._past] = key[:, :, 0]
            values[: self._rows, :, self._past] = value[:, :, 0]
        else:
            keys[self._index, :, self._positions] = key[:, :, 0]
            values[self._index, :, self._positions] = value[:, :, 0]
        return keys[: self._rows, :, : self._past + 1], values[: self._rows, :, : self._past + 1]

    def _resize(self, like: Sequence[KeyValue], slots: int, capacity: int, rows: int, length: int) -> None:
        """Tensors of `like`'s heads and sizes; the first `length` columns of the first `rows` slots are kept."""
        held = self._layers_kv
        # Zeros, not what the memory held: a masked NaN times 0 would still be NaN.
        self._layers_kv = [
            (
                k.new_zeros((slots, k.shape[-3], capacity, k.shape[-1])),
                v.new_zeros((slots, v.shape[-3], capacity, v.shape[-1])),
            )
            for k, v in like
        ]
        self.slots, self.capacity = slots, capacity
        if rows:
            for old, new in zip(held, self._layers_kv, strict=True):
                for tensor, larger in zip(old, new, strict=True):
                    larger[:rows, :, :length] = tensor[:rows, :, :length]


class Masks:
    """Attention masks for rows of different lengths, in the form that the model's attention takes.

    sdpa and eager attention take an additive mask [rows, 1, 1, columns]; a model with several kinds of layers takes a
    mapping from kind to mask (transformers' create_masks_for_generate). Rows of equal length need none: transformers
    then builds its own from the cache's sizes, sliding windows included.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        if config._attn_implementation not in ("sdpa", "eager"):
            raise self._refuse(f"attention {config._attn_implementation!r}", "Load it with attn_implementation='sdpa'.")
        if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "kv_sharing_modes", None):
            raise self._refuse("layers that share keys and values")
        if getattr(config, "use_bidirectional_attention", None) or not getattr(config, "is_causal", True):
            raise self._refuse("attention that is not causal")
        window = getattr(config, "sliding_window", None)
        types = sorted(set(getattr(config, "layer_types", None) or ()))
        if not types:
            if getattr(config, "attention_chunk_size", None) is not None:
                raise self._refuse("chunked attention")
            types = ["full_attention" if window is None else "sliding_attention"]
        for kind in types:
            if kind not in ("full_attention", "sliding_attention"):
                raise self._refuse(f"layers of type {kind!r}")
        self._windows = {kind: window if kind == "sliding_attention" else None for kind in types}
        self._dtype: torch.dtype = model.dtype

    @staticmethod
    def _refuse(what: str, remedy: str = "Choose a base with full or sliding-window attention.") -> UnsupportedModel:
        return UnsupportedModel(f"sampling does not support a model with {what}", remedy=remedy)

    def __call__(self, positions: torch.Tensor, longest: int) -> Any:
        """Masks for one query per row at `positions` int64 [rows], over the columns 0..longest."""
        columns = torch.arange(longest + 1, device=positions.device)[None]
        query = positions[:, None]
        masks = {}
        for kind, window in self._windows.items():
            seen = columns <= query
            if window is not None:
                seen &= columns > query - window
            mask = torch.zeros(seen.shape, dtype=self._dtype, device=positions.device)
            masks[kind] = mask.masked_fill_(~seen, torch.finfo(self._dtype).min)[:, None, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))

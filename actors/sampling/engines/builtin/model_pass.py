"""One forward of the sampled model: positions, masks, adapters per row, and logits only where they are needed."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.cache_utils import Cache

from tinsmith.actors.sampling.engines.builtin.kv_cache import Masks, PromptCache, SlotCache
from tinsmith.actors.sampling.engines.builtin.versions import AdapterHooks, Groups, PublishedAdapter
from tinsmith.bus.protocol.errors import UnsupportedModel


class ModelPass:
    """Runs a transformers causal LM over rows with caches of this engine.

    Raises UnsupportedModel for a model without explicit positions, an output head or a known context, or with layers
    that don't keep plain keys and values.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        parameters = inspect.signature(model.forward).parameters
        head = model.get_output_embeddings()
        context = getattr(config, "max_position_embeddings", None)
        if "position_ids" not in parameters or head is None or context is None:
            raise UnsupportedModel(
                "sampling needs a model with explicit positions, an output head and max_position_embeddings",
                remedy="Choose a decoder-only base with rotary or learned positions.",
            )
        self._model = model
        self._masks = Masks(model)
        self._hooks = AdapterHooks(model)
        # Renamed in transformers 5.24; the versions before know the older name alone.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._positions: torch.Tensor | None = None
        self._head_hook = head.register_forward_pre_hook(self._select)
        self.context = int(context)
        self.vocab_size = int(config.vocab_size)
        self.device: torch.device = model.device

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, cache: SlotCache, groups: Groups) -> torch.Tensor:
        """Logits [rows, vocab] after one token int64 [rows] per row at `positions` int64 [rows].

        The caller has told the cache of the positions (SlotCache.begin).
        """
        mask = self._masks(positions, cache.longest) if cache.ragged else None
        return self._run(tokens[:, None], positions[:, None], mask, cache, groups)[:, -1]

    def prompt(
        self,
        tokens: torch.Tensor,
        offset: int,
        cache: PromptCache,
        adapters: list[PublishedAdapter | None],
        positions: torch.Tensor | None,
    ) -> torch.Tensor:
        """Logits after prompt tokens int64 [rows, n] that begin at position `offset` of every row.

        [rows, 1, vocab] at the index `positions` int64 [rows] of each row, or [rows, n, vocab] at all when it is None.
        Padding is on the right, where no valid token sees it, so transformers' own causal mask is right.
        """
        at = torch.arange(offset, offset + tokens.shape[1], device=self.device).expand(tokens.shape)
        self._positions = positions
        try:
            return self._run(tokens, at, None, cache, rows_of(adapters, self.device))
        finally:
            self._positions = None

    def close(self) -> None:
        """Take the hooks off the model, which is then as it was."""
        self._hooks.apply(())
        self._head_hook.remove()

    def _run(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: Any, cache: Cache, groups: Groups
    ) -> torch.Tensor:
        self._hooks.apply(groups)
        inputs = {self._cache_argument: cache, "attention_mask": mask, "position_ids": positions}
        logits: torch.Tensor = self._model(input_ids=tokens, use_cache=True, **inputs).logits
        return logits

    def _select(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
        """Before the output head: keep one position per row, so that no logits are made of the others."""
        if self._positions is None:
            return None
        hidden = inputs[0]
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        return (hidden[rows, self._positions][:, None], *inputs[1:])


def rows_of(adapters: list[PublishedAdapter | None], device: torch.device) -> Groups:
    """Rows of the batch by adapter, as AdapterHooks takes them; one adapter for all rows has no index."""
    groups: dict[int, tuple[PublishedAdapter, list[int]]] = {}
    for row, adapter in enumerate(adapters):
        if adapter is not None:
            groups.setdefault(id(adapter), (adapter, []))[1].append(row)
    return [
        (None if len(rows) == len(adapters) else torch.tensor(rows, device=device), adapter)
        for adapter, rows in groups.values()
    ]

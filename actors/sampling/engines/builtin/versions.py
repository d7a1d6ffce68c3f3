"""Published adapter versions: read from PEFT directories, held under a bound, applied to the rows that ask for them.

A version is immutable and found by its full key; a missing one is an error, never the newest in its place.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import linear

from tinsmith.bus.protocol.errors import InvalidInput, UnknownVersion, UnsupportedModel

BASE = "base"
"""Key of the base model itself: no adapter."""
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_STAMP = "#"
"""Parts a name, which can't hold it, from what tells a directory from the next of that name."""


@dataclass(frozen=True)
class PublishedAdapter:
    """One version's low-rank weights: module path -> (A [rank, in], scale * B [out, rank])."""

    key: str
    weights: Mapping[str, tuple[torch.Tensor, torch.Tensor]]

    @property
    def nbytes(self) -> int:
        """Memory of all its weights, bytes."""
        return sum(a.nbytes + b.nbytes for a, b in self.weights.values())


def key_of(name: str, path: Path) -> str:
    """Key of the version that lies in the directory `path` under a name now: one that is published later under the same
    name, after this one was deleted, has another. Raises UnknownVersion when there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        raise unpublished(name) from None
    return f"{name}{_STAMP}{found.st_ino:x}.{found.st_ctime_ns:x}"


def name_of(key: str) -> str:
    """The name in a key."""
    return key.partition(_STAMP)[0]


def unpublished(key: str) -> UnknownVersion:
    """The error for a version that is not there."""
    return UnknownVersion(
        f"no version {name_of(key)!r} is published",
        remedy="Sample from a version that publish returned, or from 'base'.",
        field="version",
    )


Groups = Sequence[tuple[torch.Tensor | None, PublishedAdapter]]
"""Which rows of the batch (int64 index, or None for all of them) an adapter applies to; rows in no group are base."""


def is_adapter(path: Path) -> bool:
    """Whether the directory holds a PEFT adapter, rather than a whole model."""
    return (path / _CONFIG).is_file()


def load_adapter(path: Path, key: str, model: nn.Module) -> PublishedAdapter:
    """Read the adapter at `path` onto the model's device and dtype.

    Raises UnknownVersion when the files are missing or unreadable, UnsupportedModel when the adapter asks for what is
    not applied here (DoRA, biases, per-module ranks) or does not fit the model: a tensor without its Linear, a wrong
    shape, or a target module without its tensors.
    """
    try:
        config = json.loads((path / _CONFIG).read_text())
        tensors = load_file(path / _WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise UnknownVersion(
            f"version {name_of(key)!r} can't be read: {error}", remedy="Publish it again.", field="version"
        ) from error
    scale = _scale(config, key)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    paths = {name[len(_PREFIX) :].rsplit(".lora_", 1)[0] for name in tensors if ".lora_" in name}
    targets = config.get("target_modules")
    if not isinstance(targets, list) or not targets:
        raise _unfit(key, "target_modules must list module names")
    lacking = [
        name
        for name in linears
        if name not in paths and any(name == target or name.endswith(f".{target}") for target in targets)
    ]
    if lacking:
        raise _unfit(key, f"no tensors for {lacking[0]!r}, which target_modules names ({len(lacking)} such modules)")
    weights = {}
    for name in sorted(paths):
        module = linears.get(name)
        if module is None:
            raise _unfit(key, f"the model has no linear layer {name!r}")
        a = tensors.pop(f"{_PREFIX}{name}.lora_A.weight", None)
        b = tensors.pop(f"{_PREFIX}{name}.lora_B.weight", None)
        rank = int(config["r"])
        if a is None or b is None or a.shape != (rank, module.in_features) or b.shape != (module.out_features, rank):
            raise _unfit(key, f"lora_A or lora_B of {name!r} is missing or not of rank {rank} and the layer's sizes")
        to = {"device": module.weight.device, "dtype": module.weight.dtype}
        weights[name] = (a.to(**to), (b.float() * scale).to(**to))
    if tensors:
        raise _unfit(key, f"tensor {min(tensors)!r} is not a lora_A or lora_B weight of a linear layer")
    return PublishedAdapter(key, weights)


def _scale(config: Mapping[str, Any], key: str) -> float:
    """alpha / r, or alpha / sqrt(r) with use_rslora (PEFT's LoraLayer); refuses what changes more than that."""
    for name in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias", "fan_in_fan_out"):
        if config.get(name):
            raise _unfit(key, f"{name} is not supported")
    if config.get("bias", "none") != "none":
        raise _unfit(key, "trained biases are not supported")
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))


def _unfit(key: str, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"adapter {name_of(key)!r} does not fit: {why}",
        remedy="Publish plain LoRA weights of this base model's linear layers.",
        field="version",
    )


class Versions:
    """The adapters in memory: least recently used ones leave when there are too many or they weigh too much.

    An adapter that a running row holds stays usable after it left; it is then read again for the next request.
    """

    def __init__(self, model: nn.Module, locate: Callable[[str], Path], *, max_count: int, max_bytes: int) -> None:
        self._model = model
        self._locate = locate
        self._max_count, self._max_bytes = max_count, max_bytes
        self._held: OrderedDict[str, PublishedAdapter] = OrderedDict()

    def check(self, key: str) -> None:
        """Raise UnknownVersion unless the version exists, and InvalidInput when it is a whole model, not an adapter."""
        if key == BASE or key in self._held:
            return
        path = self._locate(key)
        if not path.is_dir():
            raise unpublished(key)
        if not is_adapter(path):
            raise InvalidInput(
                f"version {name_of(key)!r} is a whole model", remedy="Load it as a model of its own.", field="version"
            )

    def get(self, key: str) -> PublishedAdapter | None:
        """The adapter of a version, or None for the base; raises as `check` and `load_adapter`."""
        if key == BASE:
            return None
        adapter = self._held.get(key)
        if adapter is None:
            self.check(key)
            adapter = self._held[key] = load_adapter(self._locate(key), key, self._model)
        self._held.move_to_end(key)
        while len(self._held) > 1 and (len(self._held) > self._max_count or self.nbytes > self._max_bytes):
            self._held.popitem(last=False)
        return adapter

    @property
    def nbytes(self) -> int:
        """Memory of the adapters held, bytes."""
        return sum(adapter.nbytes for adapter in self._held.values())

    def __len__(self) -> int:
        return len(self._held)


class AdapterHooks:
    """Adds `x A^T B^T scale` to the outputs of the model's linear layers, for each row its own adapter.

    Hooks exist only while a pass has adapters, so the base alone pays nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        self._handles: dict[str, torch.utils.hooks.RemovableHandle] = {}
        self._groups: Groups = ()

    def apply(self, groups: Groups) -> None:
        """Use these adapters in every forward from now on; an empty list is the base alone."""
        self._groups = groups
        wanted = {name for _, adapter in groups for name in adapter.weights}
        if not wanted:
            for handle in self._handles.values():
                handle.remove()
            self._handles.clear()
        for name in wanted - self._handles.keys():
            self._handles[name] = self._linears[name].register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
        def add(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            x = inputs[0]
            for rows, adapter in self._groups:
                pair = adapter.weights.get(name)
                if pair is None:
                    continue
                a, b = pair
                if rows is None:
                    output.add_(linear(linear(x, a), b))
                elif x.dim() == 3:
                    output.index_add_(0, rows, linear(linear(x[rows], a), b))
                else:
                    # Mixture-of-experts layers see tokens without their rows.
                    raise UnsupportedModel(
                        f"layer {name!r} mixes the rows of a batch, so several versions can't run in it together",
                        remedy="Publish adapters without that layer.",
                    )

        return add

"""Parameters as few long tensors: all plain ones end to end in one, each DTensor's shard by itself.

Over many small tensors the calls cost more than the arithmetic; element by element the results are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from tinsmith.bus.protocol.errors import InvalidInput

_CHUNK = 1 << 16
"""Elements that are held in float64 at once: what fits the caches is faster than one pass over fresh memory."""


class Layout:
    """How named parameters lie in rows: one a dtype and device of plain parameters, then one a DTensor.

    A row is a local tensor of one dimension for plain parameters, of the shard's shape for a DTensor.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = dict(parameters)
        rows: dict[object, list[str]] = {}
        for name, parameter in parameters.items():
            key = name if isinstance(parameter, DTensor) else (parameter.dtype, parameter.device)
            rows.setdefault(key, []).append(name)
        self._rows = sorted(rows.values(), key=lambda names: isinstance(parameters[names[0]], DTensor))
        first = [self._parameters[names[0]] for names in self._rows]
        self.sharded = [_is_sharded(parameter) for parameter in first]
        """Whether a row is a part of what all ranks hold together."""
        self.counted_here = [_is_counted_here(parameter) for parameter in first]
        """Whether this rank's row enters a sum over ranks."""

    def rows(self, tensors: Mapping[str, Tensor | None]) -> list[Tensor]:
        """Tensors laid out like the parameters as rows: copies of plain ones, a DTensor's own shard; None is zeros."""
        return [self._row(names, tensors) for names in self._rows]

    def named(self, rows: Sequence[Tensor]) -> dict[str, Tensor]:
        """Rows as tensors laid out like the parameters, by name, sharing their memory."""
        found: dict[str, Tensor] = {}
        for names, row in zip(self._rows, rows, strict=True):
            parameter = self._parameters[names[0]]
            if isinstance(parameter, DTensor):
                found[names[0]] = _like(row, parameter)
                continue
            sizes = [self._parameters[name].numel() for name in names]
            for name, part in zip(names, torch.split(row, sizes), strict=True):
                found[name] = part.view(self._parameters[name].shape)
        return {name: found[name] for name in self._parameters}

    def write(self, rows: Sequence[Tensor]) -> None:
        """Set the parameters' values."""
        named = self.named(rows)
        targets = [_local(parameter.detach()) for parameter in self._parameters.values()]
        torch._foreach_copy_(targets, [_local(named[name]) for name in self._parameters])

    def _row(self, names: Sequence[str], tensors: Mapping[str, Tensor | None]) -> Tensor:
        parameter = self._parameters[names[0]]
        if isinstance(parameter, DTensor):
            given = tensors[names[0]]
            if given is None:
                return torch.zeros_like(_local(parameter.detach()))
            return _local(given.redistribute(placements=parameter.placements) if isinstance(given, DTensor) else given)
        parts = [tensors[name] for name in names]
        return torch.cat(
            [
                part.detach().reshape(-1) if part is not None else torch.zeros_like(self._parameters[name]).reshape(-1)
                for name, part in zip(names, parts, strict=True)
            ]
        )


def sum_of_squares(row: Tensor) -> Tensor:
    """In float64, without a float64 copy of the whole; 0-dimensional."""
    sums = []
    for part in torch.split(row.reshape(-1), _CHUNK):
        wide = part.double()
        sums.append(torch.dot(wide, wide))
    return torch.stack(sums).sum()


def check_like(given: Tensor, parameter: Tensor, name: str) -> Tensor:
    """This rank's part of a state tensor, laid out like the parameter, on its device, in memory of its own.

    A full plain tensor is cut to this rank's shard, without an exchange. Raises InvalidInput for another shape or type.
    """
    if given.shape != parameter.shape or given.dtype != parameter.dtype:
        raise InvalidInput(
            f"the optimizer state {name!r} is {given.dtype} {list(given.shape)}, the parameter {parameter.dtype} "
            f"{list(parameter.shape)}.",
            remedy="load the state of a model made the same way.",
            field=name,
        )
    if not isinstance(parameter, DTensor):
        return (given.full_tensor() if isinstance(given, DTensor) else given).to(parameter.device, copy=True)
    if isinstance(given, DTensor):
        return _like(given.redistribute(parameter.device_mesh, parameter.placements).to_local().clone(), parameter)
    full = given.to(parameter.device)
    shard = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return _like(shard.to_local().clone(), parameter)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_sharded(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and not all(item.is_replicate() for item in parameter.placements)


def _is_counted_here(parameter: Tensor) -> bool:
    """Whether this rank's shard enters a sum over ranks: of the copies along replicated mesh dimensions, the first."""
    if not isinstance(parameter, DTensor):
        return True
    place = parameter.device_mesh.get_coordinate()
    if place is None:
        return False
    return all(at == 0 for at, item in zip(place, parameter.placements, strict=True) if item.is_replicate())


def _like(local: Tensor, parameter: Tensor) -> Tensor:
    """The local tensor as a DTensor laid out like the parameter; itself where the parameter is plain."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )

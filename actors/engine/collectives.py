"""The ranks of one trainer as the engine sees them: sums over ranks, and decisions that all ranks share.

Invariant: every method is called by all ranks in the same order, and either returns on all of them or raises the same
error on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tinsmith.bus.protocol.errors import CommandFailed, TinsmithError

T = TypeVar("T")


def _as_typed(error: Exception) -> TinsmithError:
    if isinstance(error, TinsmithError):
        return error
    return CommandFailed(f"{type(error).__name__}: {error}", remedy="See the log of rank 0 for the cause.")


class Ranks:
    """A one-dimensional device mesh, or one rank alone when there is none."""

    def __init__(self, mesh: DeviceMesh | None, device: torch.device) -> None:
        self.mesh = mesh
        self.device = device
        self.group = mesh.get_group() if mesh is not None else None
        self.size = mesh.size() if mesh is not None else 1
        self.rank = mesh.get_local_rank() if mesh is not None else 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place; the same bits on every rank."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor (of one shape), on every rank."""
        if self.size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return parts

    def first(self, action: Callable[[], T]) -> T:
        """What `action` returns on rank 0 (it runs there alone), or its error, on every rank."""
        box: list[tuple[T | None, TinsmithError | None]] = [(None, None)]
        cause: Exception | None = None
        if self.rank == 0:
            try:
                box[0] = (action(), None)
            except Exception as error:
                cause = error
                box[0] = (None, _as_typed(error))
        if self.size > 1:
            dist.broadcast_object_list(box, group=self.group, group_src=0)
        value, failure = box[0]
        if failure is not None:
            raise failure from cause
        return cast(T, value)

    def each(self, action: Callable[[], T]) -> T:
        """What `action` returns on this rank, once it has worked on all; otherwise the first rank's error on all."""
        value: T | None = None
        failure: Exception | None = None
        try:
            value = action()
        except Exception as error:
            failure = error
        self.agree(failure, False)
        return cast(T, value)

    def agree(self, failed: Exception | None, here: bool) -> bool:
        """Raise the first rank's failure on all; where there is none, whether `here` is so on any rank."""
        failure = _as_typed(failed) if failed is not None else None
        # Two numbers tell all ranks whether there is anything to tell; the errors themselves travel only then.
        told = self.sum_(torch.tensor([failure is not None, here], dtype=torch.float32, device=self.device))
        any_failed, anywhere = (bool(count) for count in told.tolist())
        if not any_failed:
            return anywhere
        failures: list[TinsmithError | None] = [failure]
        if self.size > 1:
            failures = [None] * self.size
            dist.all_gather_object(failures, failure, group=self.group)
        raise next(found for found in failures if found is not None) from failed

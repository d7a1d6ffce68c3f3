"""Parameters, gradients and steps that the optimizer's tests and their ranks share."""

from __future__ import annotations

import torch

from tinsmith.bus.protocol.commands import OptimStepArgs

SHAPES = {"uneven": (5, 3), "one": (1,), "square": (4, 4), "plain": (3, 2)}
"""`plain` is never sharded; `one` leaves all ranks but the first without an element."""

STEPS = [
    OptimStepArgs(lr=1e-2, grad_clip_norm=1.0),
    OptimStepArgs(lr=3e-2, beta1=0.8, beta2=0.99, weight_decay=0.1),
    OptimStepArgs(lr=1e-3, eps=1e-3, grad_clip_norm=0.5),
]


def values(seed: int) -> dict[str, torch.Tensor]:
    """name -> float32 tensor, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}

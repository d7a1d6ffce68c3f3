"""The picture of a run: reward, loss, gradient norm and speed over its steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from tinsmith.bus.protocol.errors import StartupError
from tinsmith.ops.examples.rl_loop import Iteration


def require_matplotlib() -> None:
    """Raise StartupError, before a long run, when the picture could not be drawn after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise StartupError("matplotlib is not installed", remedy="Run `pip install 'tinsmith[demo]'`.")


def draw_curves(steps: Sequence[Iteration], before: float, after: float, title: str, path: Path) -> Path:
    """Write a PNG with four panels; `before` and `after` are the held-out rewards. Returns its absolute path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2, sharex=True)
    numbers = [step.number for step in steps]
    curves = (
        ("reward (mean of the step)", [step.reward for step in steps], "tab:green"),
        ("loss (nats per token)", [step.loss for step in steps], "tab:red"),
        ("grad_norm", [step.grad_norm for step in steps], "tab:blue"),
        ("trained tokens/s", [step.tokens_per_second for step in steps], "tab:gray"),
    )
    for axes, (name, values, color) in zip(panels.flat, curves, strict=True):
        axes.plot(numbers, values, marker=".", color=color)
        axes.set_title(name, fontsize=10)
        axes.grid(alpha=0.3)
    reward = panels[0, 0]
    reward.plot([numbers[0] - 1, numbers[-1]], [before, after], "D--", color="black", label="held out", alpha=0.6)
    reward.set_ylim(-0.03, 1.03)
    reward.legend(loc="lower right")
    panels[1, 1].set_ylim(bottom=0)
    for axes in panels[1]:
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title)
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
    return path

"""`tinsmith demo`: a service, a small model, and an RL loop that makes it better while you watch, start to end."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tinsmith.api import Client, Model, connect
from tinsmith.bus.protocol.errors import InvalidInput
from tinsmith.ops.demo.curves import draw_curves, require_matplotlib
from tinsmith.ops.demo.models import find_smollm2, load_tokenizer, make_tiny
from tinsmith.ops.demo.tasks import Lessons, Task, reversals, sums
from tinsmith.ops.examples.rl_loop import Iteration, evaluate, train
from tinsmith.ops.examples.supervised import teach
from tinsmith.ops.local import local_service

Name = Literal["smollm2", "tiny"]


def main(args: argparse.Namespace) -> int:
    """Run `tinsmith demo`; args: model, steps, out, and url where there is one. Returns the exit code."""
    # Set before transformers is imported: nothing here may wait for a hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    running = run_demo(args.model, args.out, steps=args.steps, url=args.url)
    try:
        return asyncio.run(_until_signal(running))
    except asyncio.CancelledError:
        return 130


async def run_demo(
    model: Name,
    out: Path,
    *,
    steps: int | None = None,
    url: str | None = None,
    seed: int = 0,
    console: Console | None = None,
) -> int:
    """Train, show, draw `out` (PNG). Returns 0 when the held-out reward rose, else 1.

    url: a running service that holds the model under the alias `model`; without one, a service of its own is started
    and stopped. Raises InvalidInput, NotAModel or StartupError before anything was started.
    """
    if steps is not None and steps < 1:
        raise InvalidInput(f"{steps} steps", remedy="Ask for 1 or more.", field="--steps")
    console = console or Console()
    begun = time.monotonic()
    require_matplotlib()
    async with AsyncExitStack() as stack:
        if model == "smollm2":
            path, task = find_smollm2(), sums(steps, seed)
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tinsmith-tiny-"))
            path, task = await asyncio.to_thread(make_tiny, Path(folder), seed=seed), reversals(steps, seed)
        console.print(f"[bold]tinsmith demo[/]: {model} learns to {task.about}")
        if url is None:
            starting = local_service(
                path, model, lambda text: console.print(f"  service: {text}", style="dim", soft_wrap=True)
            )
            url = await stack.enter_async_context(starting)
        tokenizer = await asyncio.to_thread(load_tokenizer, path)
        client = await stack.enter_async_context(connect(url))
        before, after, history = await _learn(client, model, task, tokenizer, seed, console)
    picture = await asyncio.to_thread(draw_curves, history, before, after, f"{model}: {task.about}", out)
    console.print(_table(task, before, after, history))
    console.print(f"curves: {picture}", soft_wrap=True)
    console.print(f"done in {time.monotonic() - begun:.0f} s, load included")
    if after > before:
        return 0
    console.print("[bold red]the held-out reward did not rise[/]")
    return 1


async def _learn(
    client: Client, base: str, task: Task, tokenizer: Any, seed: int, console: Console
) -> tuple[float, float, list[Iteration]]:
    """Held-out reward before and after RL, and the steps between. The model is unloaded at the end."""
    model = await client.create_model(
        base, lora_rank=task.lora_rank, lora_alpha=task.lora_alpha, unembed=task.unembed, seed=seed
    )
    if task.lessons is not None:
        await _teach(model, tokenizer, task.lessons, console)
    start = await model.publish("before")
    before = await evaluate(client, start.name, tokenizer, task.held_out, task.recipe)
    console.print(f"held-out reward before: {before:.3f}")
    steps = train(client, model, tokenizer, task.problems, task.recipe)
    history = await _show(steps, task.recipe.steps, console)
    end = await model.publish("after")
    after = await evaluate(client, end.name, tokenizer, task.held_out, task.recipe)
    console.print(f"held-out reward after:  {after:.3f}")
    await model.unload()
    return before, after, history


async def _teach(model: Model, tokenizer: Any, lessons: Lessons, console: Console) -> None:
    with console.status("supervised fine-tuning"):
        losses = [loss async for loss in teach(model, tokenizer, lessons.batches, lessons.lr)]
    console.print(f"supervised: {len(losses)} steps, loss {losses[0]:.2f} -> {losses[-1]:.2f} nats per token")


async def _show(steps: AsyncIterator[Iteration], total: int, console: Console) -> list[Iteration]:
    """Collect the steps behind a live bar; without a terminal, one line a step."""
    history = []
    columns = (
        TextColumn("RL"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("first rollout", total=total)
        async for step in steps:
            history.append(step)
            text = _line(step)
            progress.update(bar, advance=1, description=text)
            if not console.is_terminal:
                console.print(f"step {step.number:3}/{total}  {text}", soft_wrap=True, highlight=False)
    return history


def _line(step: Iteration) -> str:
    return (
        f"reward {step.reward:.3f}  loss {step.loss:+.2e}  grad_norm {step.grad_norm:.3g}  "
        f"{step.tokens_per_second:.0f} tokens/s"
    )


def _table(task: Task, before: float, after: float, history: list[Iteration]) -> Table:
    first, last = history[0], history[-1]
    speed = sum(step.tokens for step in history) / sum(step.seconds for step in history)
    table = Table("", "before", "after", title=f"{len(history)} RL steps, {speed:.0f} trained tokens/s")
    table.add_row(f"reward, {len(task.held_out)} held-out problems", f"{before:.3f}", f"{after:.3f}")
    table.add_row("reward, training (first and last step)", f"{first.reward:.3f}", f"{last.reward:.3f}")
    table.add_row("grad_norm (first and last step)", f"{first.grad_norm:.3g}", f"{last.grad_norm:.3g}")
    return table


async def _until_signal(running: Any) -> int:
    """Await the demo; SIGINT and SIGTERM cancel it, so that it stops its service before it ends."""
    task: asyncio.Task[int] = asyncio.create_task(running)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await task

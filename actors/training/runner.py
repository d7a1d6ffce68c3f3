"""The training lane: takes models' commands in order, keeps one step on the ranks and one staged, settles in order.

Invariants:
- a model's commands reach the ranks in seq order, each telling which seq must come before it;
- steps are settled (reduced and completed) in the order in which they were sent;
- a snapshot is recorded on the bus only after every command that it contains was completed.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tinsmith.actors.metrics import Catalogue
from tinsmith.actors.service.leases import Leases
from tinsmith.actors.service.options import ServiceOptions
from tinsmith.actors.training.outcome import Outcome, reduce_replies
from tinsmith.actors.training.recovery import restore_model, snapshot_of
from tinsmith.actors.workers.group import Group, build_group
from tinsmith.actors.workers.step import Step, plan_step
from tinsmith.bus.bus import Bus
from tinsmith.bus.ownership import Taken
from tinsmith.bus.protocol.envelope import MUTATING, Event, Kind
from tinsmith.bus.protocol.errors import Fenced, RanksLost, TinsmithError, UnknownModel

log = logging.getLogger("tinsmith.training")

IN_FLIGHT = 2
"""One step on the ranks and one staged behind it, so that the way to the ranks hides behind compute."""
FETCH_COMMANDS = 8
"""Commands fetched from a model's queue at once."""


@dataclass
class ModelQueue:
    """What the lane knows of one model."""

    name: str
    epoch: int
    sent: int = -1
    """The last seq that the ranks were sent (and, once settled, have applied)."""
    replay: bool = False
    """Whether what was taken before and not completed must be asked for again."""
    taken: deque[Taken] = field(default_factory=deque)
    steps: int = 0
    logged: int = 0
    """Optimizer steps and redo-log bytes since the last snapshot."""
    snapshot: int | None = None


@dataclass
class Sent:
    """A step on its way."""

    step: Step
    references: list[Any]
    queue: ModelQueue
    taken: Taken | None
    begun: float


class TrainingLane:
    """One group of ranks and the models on it."""

    def __init__(self, bus: Bus, group: Group, catalogue: Catalogue, options: ServiceOptions, leases: Leases) -> None:
        self.group = group
        self._bus = bus
        self._catalogue = catalogue
        self._options = options
        self._leases = leases
        self._queues: dict[str, ModelQueue] = {}
        self._ready: deque[str] = deque()
        self._rung = asyncio.Event()
        self._room = asyncio.Semaphore(IN_FLIGHT)
        self._sent: asyncio.Queue[Sent] = asyncio.Queue()
        self._blame: dict[str, int] = {}
        self.counters = {"steps": 0, "rebuilds": 0, "given_up": 0, "snapshots": 0, "replayed": 0, "replay_differs": 0}

    def models(self) -> dict[str, dict[str, Any]]:
        """Model -> its place, for status."""
        return {
            q.name: {"epoch": q.epoch, "sent": q.sent, "taken": len(q.taken), "snapshot": q.snapshot}
            for q in self._queues.values()
        }

    def ring(self, model: str) -> None:
        """The model may have commands."""
        if model not in self._ready:
            self._ready.append(model)
        self._rung.set()

    async def adopt(self, model: str) -> None:
        """Take over a model that exists on the bus. Raises RanksLost when the ranks do not agree on where it stands."""
        await self._queue(model)
        self.ring(model)

    async def run(self) -> None:
        """Send and settle for ever; a broken group is rebuilt and the work goes on."""
        while True:
            send = asyncio.create_task(self._send_all())
            settle = asyncio.create_task(self._settle_all())
            done, _ = await asyncio.wait({send, settle}, return_when=asyncio.FIRST_COMPLETED)
            for task in (send, settle):
                task.cancel()
            await asyncio.gather(send, settle, return_exceptions=True)
            failure = next(error for task in done if (error := task.exception()) is not None)
            if not isinstance(failure, RanksLost):
                raise failure
            log.warning("%s", failure)
            await self._rebuild(failure)

    async def _send_all(self) -> None:
        while True:
            await self._room.acquire()
            queue, taken = await self._next()
            await self._send(queue, taken)

    async def _next(self) -> tuple[ModelQueue, Taken]:
        """The next command, models in turn."""
        while True:
            while not self._ready:
                self._rung.clear()
                await self._rung.wait()
            model = self._ready.popleft()
            try:
                queue = await self._queue(model)
                if not queue.taken:
                    await self._refill(queue)
            except (Fenced, UnknownModel):
                self._drop(model)
                continue
            if queue.taken:
                self._ready.append(model)
                return queue, queue.taken.popleft()

    async def _queue(self, model: str) -> ModelQueue:
        if model not in self._queues:
            queue = ModelQueue(model, await self._leases.own(model))
            await self._find_place(queue)
            self._queues[model] = queue
        return self._queues[model]

    async def _find_place(self, queue: ModelQueue) -> None:
        """Where a model stands that is owned anew: as the ranks say, or as it is restored when they do not hold it."""
        deadline = self._options.step_deadline * (IN_FLIGHT + 1)
        held = [positions.get(queue.name) for positions in await self.group.positions(deadline)]
        if any(at != held[0] for at in held):
            raise RanksLost(f"the ranks disagree on where {queue.name} stands: {held}", remedy="The group is rebuilt.")
        if held[0] is not None and held[0][0] == self._bus.incarnation:
            queue.sent = held[0][2]
            queue.snapshot = snapshot_of(await self._bus.meta(queue.name))
        else:
            await self._restore(queue)

    async def _refill(self, queue: ModelQueue) -> None:
        queue.taken.extend(await self._bus.next(queue.name, queue.epoch, FETCH_COMMANDS, replay=queue.replay))
        queue.replay = False

    async def _send(self, queue: ModelQueue, taken: Taken) -> None:
        command = taken.command
        step = plan_step(
            command,
            epoch=queue.epoch,
            incarnation=self._bus.incarnation,
            after=queue.sent,
            ranks=self._options.ranks,
            token_budget=self._options.token_budget,
        )
        queue.sent = max(queue.sent, command.seq)
        self._sent.put_nowait(Sent(step, self.group.send(step, taken.body), queue, taken, time.time()))
        if command.kind in MUTATING:
            queue.steps += command.kind is Kind.OPTIM_STEP
            queue.logged += len(taken.body)
            # What a checkpoint brought must not depend on that checkpoint any longer: it may be deleted or replaced.
            loaded = command.kind is Kind.LOAD or command.args.get("checkpoint") is not None
            due = queue.steps >= self._options.snapshot_steps or queue.logged >= self._options.snapshot_bytes
            if loaded or due:
                await self._send_snapshot(queue)

    async def _send_snapshot(self, queue: ModelQueue) -> None:
        """Stage a snapshot right behind the command that made it due."""
        await self._room.acquire()
        queue.steps = queue.logged = 0
        path = str(self._options.snapshot_dir(queue.name, queue.sent))
        step = Step(queue.name, queue.epoch, self._bus.incarnation, "snapshot", seq=queue.sent, path=path)
        self._sent.put_nowait(Sent(step, self.group.send(step), queue, None, time.time()))

    async def _settle_all(self) -> None:
        while True:
            sent = await self._sent.get()
            try:
                replies = await self.group.replies(sent.references, self._options.step_deadline)
            except RanksLost:
                if sent.taken is not None:
                    cid = sent.taken.command.id
                    self._blame[cid] = self._blame.get(cid, 0) + 1
                raise
            self._room.release()
            if self._queues.get(sent.queue.name) is not sent.queue:
                # Unloaded, or another coordinator's: whoever closed the queue answers what was in it.
                continue
            try:
                if sent.taken is None:
                    await self._record_snapshot(sent, replies[0].error)
                    continue
                kind = sent.taken.command.kind
                outcome = reduce_replies(kind, replies, sent.step.plan, self._catalogue)
                await self._complete(sent, sent.taken, outcome, max(reply.seconds for reply in replies))
            except Fenced as error:
                log.warning("%s", error)
                self._drop(sent.queue.name)

    async def _complete(self, sent: Sent, taken: Taken, outcome: Outcome, seconds: float) -> None:
        command = taken.command
        event = make_event(taken, outcome, sent.begun, seconds)
        keep = command.kind in MUTATING
        await self._bus.complete(command.model, sent.step.epoch, taken.entry_id, event, outcome.body, keep=keep)
        self.counters["steps"] += 1
        self._blame.pop(command.id, None)
        gone = command.kind is Kind.UNLOAD and outcome.error is None
        unborn = command.kind is Kind.CREATE_MODEL and outcome.error is not None
        if gone or unborn:
            await self._bus.remove_model(command.model, sent.step.epoch)
            self._drop(command.model)
            await asyncio.to_thread(
                shutil.rmtree, self._options.snapshot_dir(command.model, 0).parent, ignore_errors=True
            )

    async def _record_snapshot(self, sent: Sent, error: dict[str, Any] | None) -> None:
        queue = sent.queue
        if error is not None:
            # The redo log stays whole, so nothing is lost; the next snapshot is tried when it falls due.
            log.error("snapshot of %s failed: %s", queue.name, TinsmithError.from_wire(error))
            return
        await self._bus.trim(queue.name, queue.epoch, sent.step.seq)
        self.counters["snapshots"] += 1
        earlier, queue.snapshot = queue.snapshot, sent.step.seq
        if earlier is not None and earlier != queue.snapshot:
            path = self._options.snapshot_dir(queue.name, earlier)
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    async def _rebuild(self, failure: RanksLost) -> None:
        """Fresh ranks, every model restored, whatever was sent but not settled taken again from the bus."""
        self.counters["rebuilds"] += 1
        self._sent = asyncio.Queue()
        self._room = asyncio.Semaphore(IN_FLIGHT)
        self.group = await build_group(self._options)
        for queue in list(self._queues.values()):
            queue.taken.clear()
            queue.replay = True
            try:
                await self._restore(queue)
                await self._give_up(queue, failure)
            except Fenced:
                self._drop(queue.name)
                continue
            self.ring(queue.name)

    async def _restore(self, queue: ModelQueue) -> None:
        restored = await restore_model(self._bus, self.group, self._options, self._catalogue, queue.name, queue.epoch)
        queue.sent = restored.applied
        queue.snapshot = restored.snapshot
        queue.steps = queue.logged = 0
        self.counters["replayed"] += restored.replayed
        self.counters["replay_differs"] += restored.differs

    async def _give_up(self, queue: ModelQueue, failure: RanksLost) -> None:
        """Bury commands that took their ranks down too often, so that the model can go on."""
        if not any(count >= self._options.max_attempts for count in self._blame.values()):
            return
        pending = await self._bus.next(queue.name, queue.epoch, FETCH_COMMANDS, replay=True)
        for taken in pending:
            if self._blame.get(taken.command.id, 0) < self._options.max_attempts:
                continue
            step = Step(
                queue.name,
                queue.epoch,
                self._bus.incarnation,
                taken.command.kind,
                seq=taken.command.seq,
                after=queue.sent,
                command=taken.command.id,
                refusal=failure.at(model=queue.name, command=taken.command.id).to_wire(),
            )
            await self.group.replies(self.group.send(step), self._options.step_deadline)
            queue.sent = taken.command.seq
            event = make_event(taken, Outcome(error=failure), time.time(), 0.0)
            await self._bus.give_up(queue.name, queue.epoch, taken.entry_id, event)
            self.counters["given_up"] += 1
            self._blame.pop(taken.command.id, None)

    def lose(self, model: str) -> None:
        """Another coordinator has the model now; what is on its way will be fenced."""
        self._drop(model)

    def _drop(self, model: str) -> None:
        self._queues.pop(model, None)
        self._leases.forget(model)


def make_event(taken: Taken, outcome: Outcome, begun: float, seconds: float) -> Event:
    """The event that tells what became of a command; times in seconds."""
    command = taken.command
    now = time.time()
    error = outcome.error
    return Event(
        id=command.id,
        model=command.model,
        kind=command.kind,
        seq=command.seq,
        ok=error is None,
        metrics=outcome.metrics,
        result=outcome.result,
        error=error.at(model=command.model, command=command.id).to_wire() if error is not None else None,
        flags=outcome.flags,
        timing={
            "queued": max(0.0, begun - command.submitted),
            "run": seconds,
            "total": max(0.0, now - command.submitted),
        },
        body_bytes=len(outcome.body),
    )

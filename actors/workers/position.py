"""Where a model stands on a rank, and the three guards that make a command take effect exactly once.

Invariants, each kept by one line of `judge`:
1. a command whose seq was applied is never run again: its stored reply is returned;
2. a step of an epoch lower than the highest one seen is refused: its sender has lost the model;
3. a step that does not follow the applied one is refused: nothing is skipped.
The position changes together with the effect, in the same thread, and is written into every snapshot.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from tinsmith.actors.workers.step import RankReply, Step
from tinsmith.bus.protocol.errors import BusLost, CommandFailed, Fenced

KEPT_REPLIES = 16
"""More than the steps that can be in flight or staged at once, so that a replay finds each of their replies."""


@dataclass
class Position:
    """What was applied to one model on one rank."""

    incarnation: str
    epoch: int
    applied: int
    replies: OrderedDict[int, RankReply] = field(default_factory=OrderedDict)

    def judge(self, step: Step) -> RankReply | None:
        """None when the step must run now; its stored reply when it ran before.

        Raises BusLost (another life of the bus), Fenced (a lower epoch) or CommandFailed (a gap in the order).
        """
        if step.incarnation != self.incarnation:
            raise BusLost(
                f"the rank holds the model of bus incarnation {self.incarnation}, not {step.incarnation}",
                remedy="Restore the bus's data, or restart the service to begin anew.",
                model=step.model,
            )
        if step.epoch < self.epoch:
            raise Fenced(
                f"epoch {step.epoch} is over, the model is owned in epoch {self.epoch}",
                model=step.model,
                command=step.command,
            )
        self.epoch = step.epoch
        if step.seq <= self.applied:
            stored = self.replies.get(step.seq)
            if stored is None:
                raise CommandFailed(
                    f"seq {step.seq} was applied but its reply is no longer kept",
                    model=step.model,
                    command=step.command,
                )
            return stored
        if step.after != self.applied:
            raise CommandFailed(
                f"seq {step.seq} follows seq {step.after}, but {self.applied} is the last one applied",
                model=step.model,
                command=step.command,
            )
        return None

    def record(self, step: Step, reply: RankReply) -> None:
        """The step took effect (or was refused as a fact): remember its reply and move on."""
        self.applied = step.seq
        self.replies[step.seq] = reply
        while len(self.replies) > KEPT_REPLIES:
            self.replies.popitem(last=False)

"""The control lane: commands about commands. They have a queue of their own, so that none waits behind its object."""

from __future__ import annotations

from tinsmith.actors.sampling.dispatcher import SamplingLane
from tinsmith.actors.sampling.lane import Lane
from tinsmith.actors.service.leases import Leases
from tinsmith.actors.training.outcome import Outcome
from tinsmith.bus.bus import Bus
from tinsmith.bus.ownership import Taken
from tinsmith.bus.protocol.commands import parse_args
from tinsmith.bus.protocol.envelope import CONTROL_LANE, SAMPLE_LANE, Kind
from tinsmith.bus.protocol.errors import InvalidInput, UnknownCommand

ROOM = 4096
"""Commands that may be under way at once."""


class ControlLane(Lane):
    """Carries out cancel. It ends when its object has ended, so that a crash in between only repeats it."""

    def __init__(self, bus: Bus, leases: Leases, sampling: SamplingLane) -> None:
        super().__init__(CONTROL_LANE, Kind.CANCEL, bus, leases, ROOM)
        self._sampling = sampling

    async def carry_out(self, taken: Taken) -> Outcome:
        """`cancelled` in the result tells whether it was stopped, or had ended by itself."""
        command = parse_args(Kind.CANCEL, taken.command.args).command
        stands = await self._bus.stands(command)
        if stands is None:
            raise UnknownCommand(
                f"the bus has no record of {command!r}", remedy="Check the id.", command=taken.command.id
            )
        if stands[0] != SAMPLE_LANE:
            raise InvalidInput(
                f"{command!r} is a command of model {stands[0]!r}, whose order would have a hole without it",
                remedy="Only samples can be stopped.",
                field="command",
            )
        return Outcome(result={"cancelled": await self._sampling.cancel(command)})

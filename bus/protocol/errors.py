"""The one exception tree: what can go wrong with a command, each with a code that survives the wire and a remedy.

An error names where it happened (model, command, datum, field) and says what to do. `to_wire` and `from_wire` carry
it through an event, so a caller catches the same class that a rank raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

_PLACES = ("model", "command", "datum", "field")


class TinsmithError(Exception):
    """Base of every error that Tinsmith raises on purpose."""

    code: ClassVar[str] = "error"
    _codes: ClassVar[dict[str, type[TinsmithError]]] = {}

    def __init__(
        self,
        message: str,
        *,
        remedy: str = "",
        model: str | None = None,
        command: str | None = None,
        datum: int | None = None,
        field: str | None = None,
    ) -> None:
        self.message = message
        self.remedy = remedy
        self.model = model
        self.command = command
        self.datum = datum
        self.field = field
        super().__init__(message)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "code" not in cls.__dict__:
            return  # Made by a framework around one of ours, as Ray does: it keeps its parent's code.
        taken = TinsmithError._codes.setdefault(cls.code, cls)
        if taken is not cls:
            raise TypeError(f"error code {cls.code!r} is declared by both {taken.__name__} and {cls.__name__}")

    def __str__(self) -> str:
        places = ", ".join(f"{name} {getattr(self, name)!r}" for name in _PLACES if getattr(self, name) is not None)
        text = f"{places}: {self.message}" if places else self.message
        return f"{text} Remedy: {self.remedy}" if self.remedy else text

    def __reduce__(self) -> tuple[Any, ...]:
        return TinsmithError.from_wire, (self.to_wire(),)

    def at(self, *, model: str | None = None, command: str | None = None) -> Self:
        """Name the model and the command where the raiser could not know them; returns self."""
        self.model = self.model or model
        self.command = self.command or command
        return self

    def to_wire(self) -> dict[str, Any]:
        """A msgpack-able mapping: code, message, remedy, and the places that are known."""
        wire: dict[str, Any] = {"code": self.code, "message": self.message, "remedy": self.remedy}
        wire.update({name: getattr(self, name) for name in _PLACES if getattr(self, name) is not None})
        return wire

    @staticmethod
    def from_wire(wire: Mapping[str, Any]) -> TinsmithError:
        """The error that `to_wire` described; an unknown code (a newer server) becomes a plain TinsmithError."""
        cls = TinsmithError._codes.get(str(wire.get("code")), TinsmithError)
        places = {name: wire.get(name) for name in _PLACES}
        return cls(str(wire.get("message", "")), remedy=str(wire.get("remedy", "")), **places)


# What the caller sent.
class InvalidInput(TinsmithError):
    """The command's arguments or its data are wrong; nothing was changed."""

    code = "invalid_input"


class InvalidDatum(InvalidInput):
    """One datum is wrong: `datum` and `field` say which; nothing was changed."""

    code = "invalid_datum"


class SequenceTooLong(InvalidDatum):
    """A datum is longer than the model's context; it is never cut."""

    code = "sequence_too_long"


class UnknownLoss(InvalidInput):
    """No loss of that name is registered."""

    code = "unknown_loss"


class InvalidLossConfig(InvalidInput):
    """A loss config key is unknown, of the wrong type or out of its range."""

    code = "invalid_loss_config"


class UnknownModel(InvalidInput):
    """No model of that name is held by this service."""

    code = "unknown_model"


class ModelExists(InvalidInput):
    """A model of that name is already held by this service."""

    code = "model_exists"


class UnknownVersion(InvalidInput):
    """No published version or checkpoint of that name exists."""

    code = "unknown_version"


class VersionExists(InvalidInput):
    """A checkpoint or published version of that name exists and is not to be replaced."""

    code = "version_exists"


class UnsupportedModel(InvalidInput):
    """The base model, or a layer of it, can't be trained as asked."""

    code = "unsupported_model"


class DamagedCheckpoint(TinsmithError):
    """A checkpoint's files are not those that were written; nothing was changed."""

    code = "damaged_checkpoint"


class DiskFull(TinsmithError):
    """The disk has no room for a checkpoint, version or snapshot; nothing was left of it, nothing else was changed."""

    code = "disk_full"


class NoGradients(InvalidInput):
    """optim_step without a forward_backward since the last step."""

    code = "no_gradients"


class SeqConflict(InvalidInput):
    """Another command already holds this sequence number of the model."""

    code = "seq_conflict"


class CommandConflict(InvalidInput):
    """The same command id was submitted before with another content."""

    code = "command_conflict"


class UnknownCommand(InvalidInput):
    """The bus has no record of that command id: never submitted, or expired."""

    code = "unknown_command"


# What the computation met.
class NonFinite(TinsmithError):
    """A loss or gradient is NaN or infinite; the optimizer changed nothing."""

    code = "non_finite"


class MetricError(TinsmithError):
    """A worker's columns do not fit the metric catalogue: unequal lengths, or a required column is missing."""

    code = "metric"


class RanksLost(TinsmithError):
    """A rank died or a collective hung, and the command could not be carried out."""

    code = "ranks_lost"


class CommandFailed(TinsmithError):
    """An unforeseen failure inside the service; the message carries the cause."""

    code = "command_failed"


# The bus and its server.
class BusError(TinsmithError):
    """The bus could not do what was asked."""

    code = "bus"


class Busy(BusError):
    """The model's backlog is full or the server is out of memory; try again with the same command id."""

    code = "busy"


class Fenced(BusError):
    """The caller's epoch is not the model's: another coordinator owns it now."""

    code = "fenced"


class LeaseHeld(BusError):
    """Another coordinator owns the model and its lease still runs."""

    code = "lease_held"


class BusLost(BusError):
    """The server came back without its data (another incarnation): what was in flight is unknown."""

    code = "bus_lost"


class BusUnreachable(BusError):
    """No server answered before the deadline."""

    code = "bus_unreachable"


class UnsafeServer(BusError):
    """The server failed its start-up self-test (version, eviction policy, scripts)."""

    code = "unsafe_server"


class Gap(BusError):
    """The reader fell behind retention: `missed` events are gone."""

    code = "gap"

    def __init__(self, message: str, *, missed: int = 0, **places: Any) -> None:
        super().__init__(message, **places)
        self.missed = missed

    def to_wire(self) -> dict[str, Any]:
        """As the base, with the exact count of missed events."""
        return {**super().to_wire(), "missed": self.missed}


class ProtocolError(BusError):
    """Bytes that are not a Tinsmith frame, or of a version this side does not speak."""

    code = "protocol"


class Cancelled(TinsmithError):
    """Somebody asked that this command be stopped."""

    code = "cancelled"


def cancelled() -> Cancelled:
    """The error of a command that was stopped."""
    return Cancelled("it was stopped on request", remedy="Submit it again with a new id if it is wanted after all.")


class DeadlineExceeded(TinsmithError):
    """The caller's own deadline passed; the command itself goes on and its result is kept."""

    code = "deadline"


# Start-up.
class StartupError(TinsmithError):
    """The service can't start as asked."""

    code = "startup"


class StateInUse(StartupError):
    """Another server holds the state directory."""

    code = "state_in_use"


class PortInUse(StartupError):
    """Another program listens on the port."""

    code = "port_in_use"


class InvalidCatalogue(StartupError):
    """A metric declaration is wrong; the message names the entry."""

    code = "invalid_catalogue"


class NotAModel(StartupError):
    """The path or name is not a causal language model that can be loaded."""

    code = "not_a_model"

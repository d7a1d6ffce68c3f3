"""What each kind of command may ask: one pydantic schema a kind, checked before anything is written or run.

Defaults of AdamW are those of the Tinker API (beta2 0.95, eps 1e-12, no decay, no clip).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tinsmith.bus.protocol.envelope import NAME_PATTERN, Kind, Name
from tinsmith.bus.protocol.errors import InvalidInput, TinsmithError

REFUSED = "refused"
"""The only argument (a TinsmithError.to_wire) of a command that its door refused: it takes its place in the order and
fails with that error there, so that those behind it are not held up by a hole."""

Place = Annotated[str, Field(pattern=f"^{NAME_PATTERN}/{NAME_PATTERN}$")]
"""`model/name`: a checkpoint or a published version of a model."""


class Args(BaseModel):
    """Base of all argument schemas: unknown or mistyped arguments are refused, numbers must be finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LoraSpec(Args):
    """Low-rank adapters on the linear layers that the flags choose."""

    rank: int = Field(ge=1, le=1024)
    alpha: float | None = Field(default=None, gt=0)
    """Scale is alpha / rank; twice the rank when not given."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    attn: bool = True
    mlp: bool = True
    unembed: bool = False

    @property
    def scale(self) -> float:
        """The factor on the adapter's output."""
        return (self.alpha if self.alpha is not None else 2.0 * self.rank) / self.rank

    @model_validator(mode="after")
    def _trains_something(self) -> LoraSpec:
        if not (self.attn or self.mlp or self.unembed):
            raise ValueError("at least one of attn, mlp and unembed must be true")
        return self


class CreateModelArgs(Args):
    """A new model over the served base: with adapters (`lora`), or full fine-tuning (`lora` null).

    With `checkpoint`, it begins with those weights (and with `optimizer`, that optimizer's state) in the same command.
    """

    base: str = Field(min_length=1)
    lora: LoraSpec | None = None
    metadata: dict[str, str] = {}
    checkpoint: Place | None = None
    optimizer: bool = False


class ForwardArgs(Args):
    """forward and forward_backward: a loss by name with its own config; the data are in the body."""

    loss: str
    config: dict[str, float | int | bool | str] = {}


class OptimStepArgs(Args):
    """One AdamW step over the gradients accumulated since the last one."""

    lr: float = Field(ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = Field(default=0.0, ge=0)
    """Largest global gradient norm; 0 leaves gradients as they are."""
    on_non_finite: Literal["fail", "skip"] = "fail"
    abort_after: int | None = Field(default=None, ge=1)
    """With `skip`: fail after this many skipped steps in a row."""


class SaveArgs(Args):
    """A checkpoint under this name: weights, optimizer state and position."""

    name: Name
    overwrite: bool = False


class LoadArgs(Args):
    """Weights of a checkpoint `model/name`, with the optimizer's state only when asked."""

    checkpoint: Place
    optimizer: bool = False


class PublishArgs(Args):
    """An immutable version for the samplers under this name."""

    name: Name


class NoArgs(Args):
    """For kinds that take none."""


class SampleArgs(Args):
    """Sample `n` continuations of the prompt in the body from one immutable version."""

    version: Literal["base"] | Place = "base"
    """`base`, or `model/name` as publish returned it."""
    n: int = Field(default=1, ge=1, le=1024)
    max_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""
    top_k: int = Field(default=-1, ge=-1)
    """-1 or 0: no limit."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop_tokens: tuple[int, ...] | None = None
    """None: the model's own end tokens; an empty tuple: never stop at a token."""
    stop_strings: tuple[str, ...] = ()
    prompt_logprobs: bool = False
    prompt_last_n: int | None = Field(default=None, ge=1)
    """Log-probs of the last so many prompt tokens alone; those before are NaN."""
    topk: int = Field(default=0, ge=0, le=256)
    """So many of the likeliest tokens beside each sampled one."""
    prompt_topk: int = Field(default=0, ge=0, le=256)
    """So many of the likeliest tokens at each position of the prompt."""
    prompt_draws: int = Field(default=0, ge=0, le=256)
    """So many tokens drawn, with replacement and at `temperature`, at each position of the prompt but the first."""
    stream: bool = False
    """Send parts to the submitter's inbox as they are sampled; the result is the same and comes whole at the end."""


class CancelArgs(Args):
    """Stop a sampling command and free its place; it fails with Cancelled. One that has ended stays as it ended."""

    command: Name


SCHEMAS: dict[Kind, type[Args]] = {
    Kind.CREATE_MODEL: CreateModelArgs,
    Kind.FORWARD: ForwardArgs,
    Kind.FORWARD_BACKWARD: ForwardArgs,
    Kind.OPTIM_STEP: OptimStepArgs,
    Kind.SAVE: SaveArgs,
    Kind.LOAD: LoadArgs,
    Kind.PUBLISH: PublishArgs,
    Kind.UNLOAD: NoArgs,
    Kind.INFO: NoArgs,
    Kind.SAMPLE: SampleArgs,
    Kind.CANCEL: CancelArgs,
}


def parse_args(kind: Kind, args: Mapping[str, Any]) -> Any:
    """The arguments as the kind's schema.

    Raises InvalidInput that names the argument and what is allowed, or the error of a command that was REFUSED.
    """
    if set(args) == {REFUSED} and isinstance(args[REFUSED], dict):
        raise TinsmithError.from_wire(args[REFUSED])
    try:
        return SCHEMAS[kind].model_validate(args)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "arguments"
        allowed = ", ".join(SCHEMAS[kind].model_fields) or "no arguments"
        raise InvalidInput(
            f"{first['msg']} (got {first['input']!r})",
            remedy=f"{kind.value} takes: {allowed}.",
            field=name,
        ) from None

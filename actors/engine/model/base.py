"""The base model: any causal language model that transformers can load from local files, and the facts about it.

Nothing is ever fetched from a network. What can't be loaded whole and exactly is refused with NotAModel, what can be
loaded but not scored exactly with UnsupportedModel.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from tinsmith.actors.engine.model.head import HeadMath
from tinsmith.bus.protocol.errors import NotAModel, UnsupportedModel

_REMEDY = "Name a directory with config.json and *.safetensors, or a .gguf file (or a directory that holds one)."
_HINTS = ("logit", "multiplier", "scal", "head")


@dataclass(frozen=True)
class ModelInfo:
    """What a caller may know of a base model."""

    name: str
    architecture: str
    vocab_size: int
    context: int
    """Longest sequence, in tokens."""
    eos: tuple[int, ...]
    parameters: int
    hidden_size: int
    layers: int
    tied: bool
    """The output head is the embedding."""


@dataclass(frozen=True)
class BaseModel:
    """A loaded model in evaluation mode, not yet sharded, and how its logits are made from hidden states."""

    module: nn.Module
    info: ModelInfo
    math: HeadMath


def locate(path: str | Path) -> tuple[Path, dict[str, str]]:
    """The directory to load from, and the extra argument that names a GGUF file."""
    place = Path(path)
    if place.is_file() and place.suffix == ".gguf":
        return place.parent, {"gguf_file": place.name}
    if place.is_dir():
        if (place / "config.json").is_file():
            return place, {}
        files = sorted(place.glob("*.gguf"))
        if len(files) == 1:
            return place, {"gguf_file": files[0].name}
        if files:
            raise NotAModel(f"{place} holds {len(files)} .gguf files", remedy="Name one of them.")
    raise NotAModel(f"{place} is not a model", remedy=_REMEDY)


def load_base(path: str | Path, *, name: str = "", dtype: torch.dtype = torch.float32) -> BaseModel:
    """The model at `path`, in `dtype` on the CPU, frozen.

    Raises NotAModel when it can't be loaded completely, UnsupportedModel when its logits are not the ones that
    chunked scoring would compute.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    directory, extra = locate(path)
    logging.disable_progress_bar()  # one bar a rank would fill the log
    try:
        module, report = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, local_files_only=True, output_loading_info=True, **extra
        )
    except Exception as error:
        raise NotAModel(f"{path} could not be loaded: {type(error).__name__}: {error}", remedy=_REMEDY) from error
    absent = sorted([*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])])
    if absent:
        raise NotAModel(
            f"{path} lacks {len(absent)} weights that its architecture needs, the first {absent[0]!r}",
            remedy="Complete the checkpoint: missing weights are never made up.",
        )
    if getattr(module.config, "quantization_config", None) is not None:
        if not extra:
            raise NotAModel(f"{path} is quantized", remedy="Use the unquantized weights, or a .gguf file.")
        # The weights were dequantized while loading; without these marks the model can be saved like any other.
        del module.config.quantization_config
    if extra:
        for mark in ("hf_quantizer", "is_quantized", "quantization_method"):
            module.__dict__.pop(mark, None)
    module.eval().requires_grad_(False)
    info = _describe(module, name or directory.name)
    math = _head_math(module)
    _verify_head(module, math, info)
    return BaseModel(module, info, math)


def has_tokenizer(path: str | Path) -> bool:
    """Whether a tokenizer lies beside the weights; a model without one takes and gives token ids only."""
    directory, extra = locate(path)
    return bool(extra) or any(directory.glob("tokenizer*"))


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer that lies beside the model's weights. Raises NotAModel when there is none."""
    from transformers import AutoTokenizer

    directory, extra = locate(path)
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, **extra)
    except Exception as error:
        raise NotAModel(
            f"{path} has no tokenizer that can be loaded: {type(error).__name__}: {error}",
            remedy="Put tokenizer.json and tokenizer_config.json beside the weights.",
        ) from error


def decoder_of(module: nn.Module) -> nn.Module:
    """The part that turns tokens into hidden states (everything but the output head)."""
    return cast(nn.Module, cast(Any, module).get_decoder())


def layers_of(module: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers and its name in `module`. Raises UnsupportedModel when there is none."""
    decoder = decoder_of(module)
    count = _text_config(module).num_hidden_layers
    for name, child in module.named_modules():
        if isinstance(child, nn.ModuleList) and len(child) == count and any(c is child for c in decoder.modules()):
            return name, child
    raise UnsupportedModel(
        f"{type(module).__name__} has no list of {count} decoder layers", remedy="Use a decoder-only model."
    )


def _text_config(module: nn.Module) -> Any:
    return cast(Any, module).config.get_text_config(decoder=True)


def _describe(module: nn.Module, name: str) -> ModelInfo:
    config = _text_config(module)
    head = cast(Any, module).get_output_embeddings()
    embedding = cast(Any, module).get_input_embeddings()
    if not isinstance(head, nn.Linear):
        raise UnsupportedModel(f"{type(module).__name__} has no linear output head", remedy="Use a causal LM.")
    context = getattr(config, "max_position_embeddings", None)
    if not isinstance(context, int) or context < 1:
        raise UnsupportedModel(
            "the config does not say the longest sequence",
            field="max_position_embeddings",
            remedy="Set max_position_embeddings in config.json.",
        )
    generation = getattr(module, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(config, "eos_token_id", None)
    layers_of(module)
    return ModelInfo(
        name=name,
        architecture=type(module).__name__,
        vocab_size=min(head.weight.shape[0], embedding.weight.shape[0]),
        context=context,
        eos=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        parameters=sum(p.numel() for p in module.parameters()),
        hidden_size=head.weight.shape[1],
        layers=config.num_hidden_layers,
        tied=head.weight is embedding.weight,
    )


def _head_math(module: nn.Module) -> HeadMath:
    """How the config says that logits follow from head(hidden)."""
    config = _text_config(module)
    scale = 1.0
    for field, inverse in (("logit_scale", False), ("lm_head_multiplier", False), ("logits_scaling", True)):
        value = getattr(config, field, None)
        if value is not None:
            scale *= 1.0 / float(value) if inverse else float(value)
    cap = getattr(config, "final_logit_softcapping", None)
    return HeadMath(scale=scale, softcap=None if cap is None else float(cap))


@torch.no_grad()
def _verify_head(module: nn.Module, math: HeadMath, info: ModelInfo) -> None:
    """Compare the model's own logits for three tokens with ours, so that no hidden head logic is ever skipped."""
    tokens = torch.tensor([[i % info.vocab_size for i in (1, 2, 3)]])
    try:
        own: Tensor = module(input_ids=tokens, use_cache=False).logits.float()
        hidden: Tensor = decoder_of(module)(input_ids=tokens, use_cache=False)[0]
        ours = math.apply(cast(Any, module).get_output_embeddings()(hidden))
    except Exception as error:
        raise UnsupportedModel(
            f"{info.architecture} can't be run on tokens alone: {type(error).__name__}: {error}",
            remedy="Use a text-only causal LM.",
        ) from error
    tolerance = 1e-4 if own.dtype == torch.float32 and hidden.dtype == torch.float32 else 5e-2
    if own.shape == ours.shape and (own - ours).abs().max() <= tolerance * own.abs().max().clamp(min=1.0):
        return
    config = _text_config(module).to_dict()
    suspects = [f for f, v in config.items() if isinstance(v, (int, float)) and any(h in f for h in _HINTS)]
    raise UnsupportedModel(
        f"{info.architecture} makes its logits in a way that scoring does not know",
        field=", ".join(suspects) or None,
        remedy="Use a model whose logits are head(hidden), scaled or soft-capped as its config says.",
    )

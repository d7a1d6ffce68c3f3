"""A checkpoint or published version as a folder that other programs load, without a running service.

`peft`: a PEFT adapter over the base. `hf`: a whole model, the adapter merged into the base's weights. Both give the
logits of the trained model. Merged weights are float32, as they are trained.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tinsmith.actors.engine import checkpoint
from tinsmith.actors.engine.formats import ADAPTER_CONFIG, ADAPTER_TENSORS, PREFIX, publish_full, write_adapter
from tinsmith.actors.engine.model.base import BaseModel, load_base, locate
from tinsmith.actors.engine.trainable.lora import short_targets
from tinsmith.bus.protocol.commands import CreateModelArgs, LoraSpec
from tinsmith.bus.protocol.errors import DamagedCheckpoint, InvalidInput, UnknownVersion

Format = Literal["peft", "hf"]

_FACTS = ("architecture", "vocab_size", "hidden_size", "layers", "parameters", "tied")
"""What of a base model must be that of the base that a checkpoint was trained on."""


@dataclass(frozen=True)
class Weights:
    """What a checkpoint or version holds, verified.

    tensors: of adapters, `<layer>.lora_A.weight` [rank, in] and `<layer>.lora_B.weight` [out, rank]; of a fully
    fine-tuned model, its parameters by name; empty where `ready` says that the folder can be given away as it is.
    """

    spec: LoraSpec | None
    """None: fully fine-tuned."""
    tensors: Mapping[str, Tensor]
    base: Mapping[str, Any]
    """Facts of the base model (base.ModelInfo); of a published version none."""
    base_path: str | None
    """Where the base model lay, if that is told."""
    ready: Format | None
    """The format that the folder itself is in."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    format: Format
    size: int
    """Bytes of all files."""


def export(source: Path, target: Path, *, base: str | Path | None = None, format: Format | None = None) -> Exported:
    """Write the checkpoint or version at `source` to the folder `target`, whole or not at all.

    base: path of the base model; needed to merge. format None: peft for adapters, hf for a fully fine-tuned model.
    Raises UnknownVersion and DamagedCheckpoint (source), InvalidInput (target taken, format impossible, base missing
    or not the one trained on), NotAModel (base), DiskFull.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidInput(f"{target} exists and is not empty", remedy="Name a new folder.", field="to")
    weights = read(source)
    format = format or ("hf" if weights.spec is None else "peft")
    if weights.spec is None and format == "peft":
        raise InvalidInput(
            f"{source} is a fully fine-tuned model, which has no adapter", remedy="Export it as hf.", field="format"
        )
    if weights.ready == format:
        files = [file for file in source.rglob("*") if file.is_file() and file.name != checkpoint.CHECKSUMS]
        size = sum(file.stat().st_size for file in files)
        checkpoint.write_directory(target, lambda fresh: _copy(files, source, fresh), size)
    elif format == "peft":
        assert weights.spec is not None
        layers = list(pairs(weights.tensors))
        if base is not None:
            skeleton = _skeleton(base)
            _layers(skeleton, weights.tensors)
            layers = short_targets(skeleton, layers)
        named = Path(base).resolve() if base is not None else str(weights.base["name"])
        write_adapter(target, weights.tensors, weights.spec, layers, named)
    else:
        path = _base_path(base, weights)
        model = load_base(path)
        _check_base(model, weights)
        if weights.spec is None:
            _put(model.module, weights.tensors)
        else:
            merge(model.module, weights.tensors, weights.spec.scale)
        publish_full(target, model.module, model.module.state_dict(), path)
    return Exported(target, format, sum(file.stat().st_size for file in target.rglob("*") if file.is_file()))


def read(source: Path) -> Weights:
    """The weights of a checkpoint or published version. Raises UnknownVersion, DamagedCheckpoint."""
    if (source / checkpoint.META).is_file():
        tensors, meta = checkpoint.read(source)
        params = {name.partition("/")[2]: value for name, value in tensors.items() if name.startswith("param/")}
        return Weights(CreateModelArgs.model_validate(meta["args"]).lora, params, meta["base"], None, None)
    checkpoint.verify_directory(source)
    if not (source / ADAPTER_CONFIG).is_file():
        return Weights(None, {}, {}, None, "hf")
    try:
        config = json.loads((source / ADAPTER_CONFIG).read_text())
        spec = LoraSpec(rank=config["r"], alpha=config["lora_alpha"])
        base = str(config["base_model_name_or_path"])
    except (ValueError, KeyError) as error:
        raise DamagedCheckpoint(f"{source / ADAPTER_CONFIG}: {error}", remedy="Publish it again.") from error
    tensors = {name.removeprefix(PREFIX): value for name, value in load_file(source / ADAPTER_TENSORS).items()}
    return Weights(spec, tensors, {}, base, "peft")


def pairs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Layer -> (A [rank, in], B [out, rank]). Raises DamagedCheckpoint when one is without the other."""
    layers = dict.fromkeys(name.rpartition(".lora_")[0] for name in tensors)
    try:
        return {at: (tensors[f"{at}.lora_A.weight"], tensors[f"{at}.lora_B.weight"]) for at in layers}
    except KeyError as error:
        raise DamagedCheckpoint(f"the adapter has no {error}", remedy="Use another checkpoint.") from error


@torch.no_grad()
def merge(module: nn.Module, tensors: Mapping[str, Tensor], scale: float) -> None:
    """Add `scale * B A` to the weight of every adapted layer, in place.

    A head that is the embedding becomes a matrix of its own first: the adapter changes the logits, never the inputs.
    Raises InvalidInput when the adapter does not fit.
    """
    layers = _layers(module, tensors)
    model = cast(Any, module)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embedding.weight and any(layer is head for layer in layers.values()):
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        for config in (model.config, model.config.get_text_config(decoder=True)):
            config.tie_word_embeddings = False
    for name, (a, b) in pairs(tensors).items():
        layer = layers[name]
        update = b.float() @ a.float() * scale
        layer.weight.add_((update.T if isinstance(layer, Conv1D) else update).to(layer.weight.dtype))


def _layers(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The adapted layers by name. Raises InvalidInput when one is missing or of another size."""
    modules = dict(module.named_modules())
    found: dict[str, Any] = {}
    for name, (a, b) in pairs(tensors).items():
        layer: Any = modules.get(name)
        if not isinstance(layer, (nn.Linear, Conv1D)):
            raise _other_base(f"it has no linear layer {name!r}")
        wanted = (b.shape[0], a.shape[1])
        sizes = tuple(layer.weight.shape) if isinstance(layer, nn.Linear) else tuple(layer.weight.T.shape)
        if sizes != wanted:
            raise _other_base(f"its layer {name!r} is {sizes}, the adapter is for {wanted}")
        found[name] = layer
    return found


@torch.no_grad()
def _put(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    params = dict(module.named_parameters())
    for name in sorted(params.keys() | weights.keys()):
        if name not in params or name not in weights or params[name].shape != weights[name].shape:
            raise _other_base(f"its parameter {name!r} is not one of the checkpoint's")
        params[name].copy_(weights[name])


def _check_base(model: BaseModel, weights: Weights) -> None:
    for fact in _FACTS:
        is_, was = getattr(model.info, fact), weights.base.get(fact)
        if weights.base and is_ != was:
            raise _other_base(f"its {fact} is {is_!r}, that of the base trained on was {was!r}")


def _other_base(why: str) -> InvalidInput:
    return InvalidInput(
        f"this is not the base model that was trained: {why}", remedy="Name the one it was trained on.", field="model"
    )


def _base_path(base: str | Path | None, weights: Weights) -> str | Path:
    path = base if base is not None else weights.base_path
    if path is None or not Path(path).exists():
        where = f"; it lay at {path}" if path is not None else ""
        raise InvalidInput(
            f"a whole model is made of the base model and what was trained{where}",
            remedy="Name the base model's folder (--model PATH), or export as peft.",
            field="model",
        )
    return path


def _skeleton(base: str | Path) -> nn.Module:
    """The base model's layers without their weights. Raises NotAModel."""
    from transformers import AutoConfig, AutoModelForCausalLM

    directory, extra = locate(base)
    config = AutoConfig.from_pretrained(directory, local_files_only=True, **extra)
    with torch.device("meta"):
        return cast(nn.Module, AutoModelForCausalLM.from_config(config))


def _copy(files: list[Path], source: Path, fresh: Path) -> None:
    """Copy the files and check the copies; the source may go meanwhile."""
    try:
        for file in (*files, source / checkpoint.CHECKSUMS):
            place = fresh / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)
    except FileNotFoundError as error:
        raise UnknownVersion(f"{source} was deleted meanwhile", remedy="Name one that is there.") from error
    checkpoint.verify_directory(fresh)
    (fresh / checkpoint.CHECKSUMS).unlink()  # Its writer makes it anew.

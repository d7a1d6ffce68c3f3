"""What is exported gives the logits of the trained model in the programs that load it, and what can't be is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import batch, tiny_model

from tinsmith.actors.engine import checkpoint
from tinsmith.actors.engine import export as exporting
from tinsmith.actors.engine.engine import Engine
from tinsmith.actors.engine.export import export
from tinsmith.api.cli.main import main
from tinsmith.bus.protocol.commands import CreateModelArgs, ForwardArgs, LoraSpec, OptimStepArgs
from tinsmith.bus.protocol.errors import DamagedCheckpoint, InvalidInput, NotAModel, UnknownVersion

TOKENS = torch.arange(3, 20)[None]
FULL = CreateModelArgs(base="tiny")


def lora(**fields: Any) -> CreateModelArgs:
    return CreateModelArgs(base="tiny", lora=LoraSpec(rank=4, **fields))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model by kind; `-tied` and `-untied` say what its head is."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            name, _, tied = kind.partition("-")
            changes = {"tie_word_embeddings": tied == "tied"} if tied else {}
            made[kind] = tiny_model(tmp_path_factory.mktemp(kind) / "base", name, **changes)
            (made[kind] / "tokenizer.json").write_text("{}")
        return made[kind]

    return get


def train(base: Path, args: CreateModelArgs, place: Path) -> torch.Tensor:
    """A trained model's checkpoint at place/saved, its version at place/version; returns its logits for TOKENS."""
    torch.set_num_threads(1)
    engine = Engine(base, alias="tiny", token_budget=48)
    engine.create("other", CreateModelArgs(base="tiny", lora=LoraSpec(rank=2, mlp=False)))
    engine.create("m", args)
    for seed in range(2):
        data = batch(4, seed=seed)
        engine.forward("m", data, engine.plan(data), ForwardArgs(loss="cross_entropy"), backward=True)
        engine.optim_step("m", OptimStepArgs(lr=1e-2))
    engine.save("m", place / "saved", {"seq": 3})
    engine.publish("m", place / "version")
    model = engine._models["m"]
    model.activate()
    with torch.no_grad():
        logits: torch.Tensor = model.scorer.model(input_ids=TOKENS).logits  # type: ignore[operator]
    return logits


@torch.no_grad()
def logits_of(path: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    loaded, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report.values()), report
    logits: torch.Tensor = loaded.eval()(input_ids=TOKENS).logits
    return logits


@torch.no_grad()
def peft_logits_of(base: Path, path: Path) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    logits: torch.Tensor = (
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), path).eval()(input_ids=TOKENS).logits
    )
    return logits


CASES = [
    ("llama-untied", lora()),
    ("llama-untied", lora(alpha=3.0, mlp=False)),
    ("llama-untied", lora(unembed=True)),
    ("llama-tied", lora(unembed=True)),
    ("llama-tied", lora(unembed=True, attn=False, mlp=False)),
    ("qwen3-untied", lora(attn=False)),
    ("qwen3-tied", lora(unembed=True)),
    ("gemma3-tied", lora()),
    ("gemma3-tied", lora(unembed=True)),
    ("gpt2", lora()),
    ("qwen3_moe", lora(mlp=False)),
]


@pytest.mark.parametrize(("kind", "args"), CASES)
def test_every_export_of_an_adapter_gives_the_trained_models_logits(
    bases: Callable[[str], Path], tmp_path: Path, kind: str, args: CreateModelArgs
) -> None:
    base = bases(kind)
    expected = train(base, args, tmp_path)
    before = logits_of(base)
    for source in ("saved", "version"):
        for named in (base, None):
            to = tmp_path / f"peft-{source}-{named is None}"
            assert export(tmp_path / source, to, base=named).format == "peft"
            torch.testing.assert_close(peft_logits_of(base, to), expected, rtol=1e-5, atol=1e-5)
        to = tmp_path / f"hf-{source}"
        done = export(tmp_path / source, to, base=base, format="hf")
        assert done.size == sum(file.stat().st_size for file in to.iterdir())
        torch.testing.assert_close(logits_of(to), expected, rtol=1e-5, atol=1e-5)
        assert (to / "tokenizer.json").read_text() == "{}"
        checkpoint.verify_directory(to)
    assert not torch.allclose(before, expected, atol=1e-3)
    torch.testing.assert_close(logits_of(base), before, rtol=0, atol=0)


def test_an_adapter_on_a_tied_head_leaves_the_embedding_as_it_is(bases: Callable[[str], Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = bases("qwen3-tied")
    train(base, lora(unembed=True), tmp_path)
    export(tmp_path / "saved", tmp_path / "hf", base=base, format="hf")
    plain, merged = (AutoModelForCausalLM.from_pretrained(path) for path in (base, tmp_path / "hf"))
    assert not merged.config.tie_word_embeddings
    assert torch.equal(plain.get_input_embeddings().weight, merged.get_input_embeddings().weight)
    assert not torch.equal(merged.get_input_embeddings().weight, merged.get_output_embeddings().weight)


def test_a_head_without_an_adapter_stays_tied(bases: Callable[[str], Path], tmp_path: Path) -> None:
    base = bases("llama-tied")
    train(base, lora(), tmp_path)
    export(tmp_path / "saved", tmp_path / "hf", base=base, format="hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["tie_word_embeddings"]


@pytest.mark.parametrize("kind", ["llama-untied", "llama-tied", "gemma3-tied", "qwen3_moe"])
def test_a_fully_fine_tuned_model_is_exported_whole(bases: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    base = bases(kind)
    expected = train(base, FULL, tmp_path)
    export(tmp_path / "saved", tmp_path / "one", base=base)
    export(tmp_path / "version", tmp_path / "two")
    for to in ("one", "two"):
        torch.testing.assert_close(logits_of(tmp_path / to), expected, rtol=1e-5, atol=1e-5)
        assert (tmp_path / to / "tokenizer.json").is_file()
    for source in ("saved", "version"):
        with pytest.raises(InvalidInput, match="no adapter"):
            export(tmp_path / source, tmp_path / "peft", base=base, format="peft")
    with pytest.raises(InvalidInput, match="made of the base model"):
        export(tmp_path / "saved", tmp_path / "three")


def test_a_version_is_merged_into_the_base_that_it_names(bases: Callable[[str], Path], tmp_path: Path) -> None:
    base = bases("llama-untied")
    expected = train(base, lora(), tmp_path)
    export(tmp_path / "version", tmp_path / "hf", format="hf")
    torch.testing.assert_close(logits_of(tmp_path / "hf"), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(InvalidInput, match="--model"):
        export(tmp_path / "saved", tmp_path / "other", format="hf")


def test_what_cannot_be_exported_is_refused_and_leaves_no_folder(bases: Callable[[str], Path], tmp_path: Path) -> None:
    base = bases("llama-untied")
    train(base, lora(), tmp_path)
    saved, to = tmp_path / "saved", tmp_path / "out" / "to"
    for other in ("llama-tied", "qwen3-untied"):
        with pytest.raises(InvalidInput, match="not the base model that was trained"):
            export(saved, to, base=bases(other), format="hf")
    larger = tiny_model(tmp_path / "larger", intermediate_size=80)
    for source, format in (("saved", "peft"), ("version", "hf")):
        with pytest.raises(InvalidInput, match="not the base model that was trained: its layer"):
            export(tmp_path / source, to, base=larger, format=format)  # type: ignore[arg-type]
    with pytest.raises(NotAModel):
        export(saved, to, base=tmp_path, format="hf")
    with pytest.raises(UnknownVersion):
        export(tmp_path / "absent", to)
    for source, file in (("saved", checkpoint.TENSORS), ("version", "adapter_model.safetensors")):
        data = bytearray((tmp_path / source / file).read_bytes())
        data[-1] ^= 1
        (tmp_path / source / file).write_bytes(data)
        with pytest.raises(DamagedCheckpoint):
            export(tmp_path / source, to)
    assert not to.parent.exists()


def test_a_folder_with_files_in_it_is_never_written_to(bases: Callable[[str], Path], tmp_path: Path) -> None:
    train(bases("llama-untied"), lora(), tmp_path)
    full, empty = tmp_path / "full", tmp_path / "empty"
    full.mkdir()
    empty.mkdir()
    (full / "mine").write_text("x")
    with pytest.raises(InvalidInput, match="not empty"):
        export(tmp_path / "version", full)
    assert [file.name for file in full.iterdir()] == ["mine"]
    export(tmp_path / "version", empty)
    checkpoint.verify_directory(empty)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full", "saved", "version"]


def test_a_version_that_is_deleted_while_it_is_copied_leaves_no_folder(
    bases: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(bases("llama-untied"), lora(), tmp_path)
    copy = exporting.shutil.copyfile

    def deleted_after_the_first(source: Path, target: Path) -> None:
        copy(source, target)
        shutil.rmtree(tmp_path / "version", ignore_errors=True)

    monkeypatch.setattr(exporting.shutil, "copyfile", deleted_after_the_first)
    with pytest.raises(UnknownVersion, match="deleted meanwhile"):
        export(tmp_path / "version", tmp_path / "to")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_the_command_line_exports_by_name_without_a_service(
    bases: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, state = bases("llama-untied"), tmp_path / "state"
    expected = train(base, lora(), tmp_path)
    for folder, source in (("checkpoints", "saved"), ("published", "version")):
        (state / folder / "s:train:0").mkdir(parents=True)
        (tmp_path / source).rename(state / folder / "s:train:0" / "v1")
    (state / "published" / "s:train:0" / "v1").rename(state / "published" / "s:train:0" / "v2")
    common = ["--state", str(state), "--model", str(base)]

    assert main(["export", "s:train:0/v1", *common, "--to", str(tmp_path / "a"), "--format", "hf"]) == 0
    assert "as hf to" in capsys.readouterr().out
    torch.testing.assert_close(logits_of(tmp_path / "a"), expected, rtol=1e-5, atol=1e-5)
    path = "tinker://s:train:0/sampler_weights/v2"
    assert main(["export", path, "--state", str(state), "--to", str(tmp_path / "b")]) == 0
    torch.testing.assert_close(peft_logits_of(base, tmp_path / "b"), expected, rtol=1e-5, atol=1e-5)

    for source, error in [
        ("s:train:0/none", "UnknownVersion"),
        ("tinker://s:train:0/weights/v2", "UnknownVersion"),
        ("../up", "InvalidInput"),
        ("tinker://s:train:0/sampler_weights/../../x", "InvalidInput"),
    ]:
        assert main(["export", source, *common, "--to", str(tmp_path / "c")]) == 1
        assert error in capsys.readouterr().err
    (tmp_path / "file").write_text("in the way")
    assert main(["export", path, *common, "--to", str(tmp_path / "file" / "to")]) == 1
    assert "can't be exported" in capsys.readouterr().err
    (state / "published" / "s:train:0" / "v2").rename(state / "published" / "s:train:0" / "v1")
    assert main(["export", "s:train:0/v1", *common, "--to", str(tmp_path / "c")]) == 1
    assert "tinker://s:train:0/weights/v1" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()

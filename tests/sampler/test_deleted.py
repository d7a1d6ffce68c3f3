"""A version that is deleted while it samples: what runs ends as if nothing had happened, later requests are refused."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from sampling_runs import drain, request, run, tiny_llama

from tinsmith.actors.sampling.engines.builtin import versions
from tinsmith.actors.sampling.engines.builtin.generator import Generator
from tinsmith.actors.sampling.engines.builtin.sample import Failed, Finished
from tinsmith.api.http.retention.leftovers import delete_folder
from tinsmith.bus.protocol.errors import UnknownVersion

ASKED = request("a", [5, 6, 7], "m/v", max_tokens=12, n=3, seed=1, stop_tokens=())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with one version, m/v."""
    torch.manual_seed(4)
    lora = peft.LoraConfig(r=3, lora_alpha=9, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    peft.get_peft_model(tiny_llama(), lora).save_pretrained(tmp_path / "m" / "v", save_embedding_layers=False)
    return tmp_path


def test_what_samples_from_it_goes_on_to_its_end(root: Path) -> None:
    expected = run(Generator(tiny_llama(), locate=root.joinpath), [ASKED])["a"]
    generator = Generator(tiny_llama(), locate=root.joinpath)
    generator.submit(ASKED)
    generator.step()
    assert delete_folder(root / "m" / "v")
    assert list((root / "m").iterdir()) == []
    answer = drain(generator)["a"]
    assert isinstance(answer, Finished)
    for got, want in zip(answer.sequences, expected.sequences, strict=True):
        assert got.tokens.tolist() == want.tokens.tolist()


def test_what_has_not_read_it_yet_fails_by_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = versions.load_file

    def deleted_between_two_files(path: Path) -> dict[str, torch.Tensor]:
        delete_folder(root / "m" / "v")
        return read(path)

    monkeypatch.setattr(versions, "load_file", deleted_between_two_files)
    generator = Generator(tiny_llama(), locate=root.joinpath)
    generator.submit(ASKED)
    answer = drain(generator)["a"]
    assert isinstance(answer, Failed)
    assert isinstance(answer.error, UnknownVersion)
    assert "m/v" in str(answer.error)
    with pytest.raises(UnknownVersion, match="m/v"):
        generator.submit(ASKED)


def test_what_is_published_later_under_its_name_is_not_taken_for_it(root: Path) -> None:
    """As the service does it: the key tells which of them a request found."""
    path = root / "m" / "v"
    generator = Generator(tiny_llama(), locate=lambda key: root / versions.name_of(key))
    greedy = {"max_tokens": 12, "temperature": 0.0, "stop_tokens": ()}
    first = run(generator, [request("1", [5, 6, 7], versions.key_of("m/v", path), **greedy)])["1"].sequences[0]
    assert delete_folder(path)
    with pytest.raises(UnknownVersion, match="'m/v'"):
        versions.key_of("m/v", path)
    base = tiny_llama()
    torch.manual_seed(5)
    lora = peft.LoraConfig(r=3, lora_alpha=9, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    peft.get_peft_model(base, lora).save_pretrained(path, save_embedding_layers=False)
    second = run(generator, [request("2", [5, 6, 7], versions.key_of("m/v", path), **greedy)])["2"].sequences[0]
    fresh = run(Generator(tiny_llama(), locate=root.joinpath), [request("3", [5, 6, 7], "m/v", **greedy)])["3"]
    assert second.tokens.tolist() == fresh.sequences[0].tokens.tolist() != first.tokens.tolist()

"""Checkpoints whose weights have the names that releases gave them, other than those that transformers writes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plan_driver import Driver
from safetensors.torch import load_file, save_file
from tiny_models import BY_NAME, settings, start

from blockyard.services.gpu_worker import engine
from blockyard.shared.messages import Sampling

Tensors = dict[str, torch.Tensor]


def bare(tensors: Tensors) -> Tensors:
    """GPT-2: without the first part of names, and with masks beside the weights."""
    masks = {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    return {name.removeprefix("transformer."): value for name, value in tensors.items()} | masks


def pythia(tensors: Tensors) -> Tensors:
    """The output layer by another name, masks and frequencies beside the weights."""
    extra = {f"gpt_neox.layers.0.attention.{name}": torch.ones(1) for name in ("bias", "masked_bias")}
    extra["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(2)
    return {name.replace("lm_head", "embed_out"): value for name, value in tensors.items()} | extra


def with_text_inside(tensors: Tensors) -> Tensors:
    """Mistral 3, Gemma 3: the text part within the model, as later releases have it."""
    names = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}

    def released(name: str) -> str:
        first = next((prefix for prefix in names if name.startswith(prefix)), "")
        return names[first] + name.removeprefix(first) if first else f"model.{name}"

    return {released(name): value for name, value in tensors.items()}


def with_sounds(tensors: Tensors) -> Tensors:
    """Gemma 4: the text part, with parts for sounds beside it."""
    text = {name: value for name, value in tensors.items() if ".language_model." in name}
    return text | {"model.audio_tower.layers.0.weight": torch.ones(1), "model.embed_audio.weight": torch.ones(1)}


def output(folder: Path) -> list[int]:
    driver = Driver(start(folder))
    stream = driver.add([5, 9, 3], Sampling(max_tokens=12, temperature=0.0, ignore_eos=True))
    driver.run()
    return stream.output


@pytest.mark.parametrize(
    ("name", "rename"),
    [
        ("gpt2", bare),
        ("gpt-neox", pythia),
        ("mistral3", with_text_inside),
        ("gemma3-sees", with_text_inside),
        ("gemma4-sees", with_sounds),
    ],
)
def test_released_names(name: str, rename: Callable[[Tensors], Tensors], tmp_path: Path) -> None:
    BY_NAME[name].save(tmp_path)
    expected = output(tmp_path)
    files = list(tmp_path.glob("*.safetensors"))
    tensors = {key: value for file in files for key, value in load_file(file).items()}
    for file in [*files, *tmp_path.glob("*.index.json")]:
        file.unlink()
    renamed = rename(tensors)
    assert renamed.keys() != tensors.keys()
    save_file({key: value.contiguous() for key, value in renamed.items()}, tmp_path / "model.safetensors")
    assert output(tmp_path) == expected


def test_parts_that_are_not_used_are_named_at_the_start(tmp_path: Path) -> None:
    BY_NAME["gemma3-sees"].save(tmp_path)
    notes: list[str] = []
    engine.start(settings(tmp_path), lambda phase, progress, lines: notes.extend(lines))
    line = next(note for note in notes if note.startswith("not used: "))
    assert " tensors of vision_tower, " in line
    assert line.endswith(" tensors of multi_modal_projector")


def test_the_factors_of_longrope_are_named_at_the_start(tmp_path: Path) -> None:
    BY_NAME["phi3-short"].save(tmp_path)
    notes: list[str] = []
    engine.start(settings(tmp_path), lambda phase, progress, lines: notes.extend(lines))
    assert "rotation: short_factor of longrope, as a context of 256 tokens is up to 256" in notes

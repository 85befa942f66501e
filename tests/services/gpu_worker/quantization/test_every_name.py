"""Each name of --quantization, in capitals, from the command line and from `LLM`, on a checkpoint of its format.

What the launcher settles for a name and a folder is what the worker starts with, so that names with equal settings
share a start.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from all_formats import load_samples
from packed_model import load_model
from quantized_checkpoint import Checkpoints, check_logits, logits
from reward_folders import save_reward_model
from tiny_models import BY_NAME, start
from tiny_poolers import BY_NAME as POOLERS

from blockyard.services.gpu_worker.quantization.kept.form import KeptLinear
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.launcher.models import model_files
from blockyard.services.offline import engine_args, running_model
from blockyard.services.offline.llm import LLM
from blockyard.shared.config import parsed_flags
from blockyard.shared.config.checkpoint import file_format, quantized_overrides
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.errors import ConfigError
from blockyard.shared.quantization.table import NAMES, QuantizationName

HONOURED = [name for name, one in NAMES.items() if not one.refused]
REFUSED = [name for name, one in NAMES.items() if one.refused]
SAMPLES = load_samples()
AT_LOAD = [name for name, one in NAMES.items() if one.of_16_bits is not None and name != "gguf"]


def from_command_line(folder: Path, name: str) -> Values:
    given = ["--model", str(folder), "--quantization", name, "--device", "cpu"]
    return Values(parsed_flags.from_command_line(given)[0])


def from_python(folder: Path, name: str) -> Values:
    return engine_args.read(folder, {"quantization": name, "device": "cpu"}, {})[0]


WAYS: dict[str, Callable[[Path, str], Values]] = {"command line": from_command_line, "LLM": from_python}


def settle(values: Values) -> dict[str, str]:
    """The fields of a worker that --quantization decides, as the launcher settles them."""
    overrides = quantized_overrides(values, model_files.find(values))
    return {"config_overrides": json.dumps(overrides), "load_format": file_format(values)}


class Folders:
    """Checkpoints of formats and what has started on them, each made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.write = functools.cache(self._write)
        self.start = functools.cache(self._start)
        self.plain = functools.cache(self._save)  # checkpoints that are not quantized, by the model's name

    def _write(self, method: str) -> Checkpoints:
        return SAMPLES[method].write(self._root / method)

    def _start(self, method: str, config_overrides: str, load_format: str) -> Runner:
        sample, made = SAMPLES[method], self.write(method)
        given = {"config_overrides": config_overrides, "load_format": load_format}
        return check_logits(made, sample.round_inputs, packed_fields=given)

    def _save(self, model: str) -> Path:
        BY_NAME[model].save(self._root / model)
        return self._root / model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("formats"))


def methods_of(one: QuantizationName) -> list[str]:
    """What files say that the name reads."""
    return list(dict.fromkeys([*([one.name] if one.module else []), *one.alias_of]))


def test_every_format_has_a_checkpoint() -> None:
    read = {method for name in HONOURED for method in methods_of(NAMES[name])}
    assert read == set(SAMPLES)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HONOURED)
def test_a_name_reads_the_files_of_its_format(folders: Folders, name: str, way: str) -> None:
    """With the logits of the numbers that the file stands for."""
    for method in methods_of(NAMES[name]):
        for spelled in (name, name.upper()):
            given = settle(WAYS[way](folders.write(method).packed, spelled))
            folders.start(method, **given)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", AT_LOAD)
def test_a_name_quantizes_16_bits_while_they_load(folders: Folders, name: str, way: str) -> None:
    folder = folders.plain(SAMPLES[methods_of(NAMES[name])[0]].model)
    got, forms = quantized_at_load(folder, **settle(WAYS[way](folder, name.upper())))
    plain, none = quantized_at_load(folder, "{}", "auto")
    assert not none
    assert len(forms) == 1
    assert ("fp8" in methods_of(NAMES[name])) == (forms == {"Fp8W8A8"})
    assert 0 < float((got - plain).std() / plain.std()) < 0.5


@functools.cache
def quantized_at_load(folder: Path, config_overrides: str, load_format: str) -> tuple[torch.Tensor, set[str]]:
    """Logits, and the forms of matrices."""
    given: dict[str, Any] = {"config_overrides": config_overrides, "load_format": load_format}
    runner = start(folder, max_model_len=64, **given)
    methods = [one.method for one in runner.model.linears()]
    return logits(runner), {one.kept_form.name for one in methods if isinstance(one, KeptLinear)}


@pytest.mark.parametrize("name", [name for name in HONOURED if name not in AT_LOAD and name != "gguf"])
def test_a_name_that_reads_files_alone_is_refused_for_16_bits(folders: Folders, name: str) -> None:
    for way in WAYS.values():
        with pytest.raises(ConfigError, match=f"(?i)quantization {name}: the checkpoint is not quantized; .* by: "):
            settle(way(folders.plain("llama"), name.upper()))


@pytest.mark.parametrize("name", HONOURED)
def test_another_name_than_the_files_is_an_error(folders: Folders, name: str) -> None:
    stranger = "awq" if "awq" not in methods_of(NAMES[name]) else "hqq" if name != "ipex" else ""
    if not stranger:  # ipex reads all files but those that are dequantized
        stranger = "squeezellm"
    for way in WAYS.values():
        with pytest.raises(ConfigError, match=f"(?i){name}: the checkpoint is quantized by {stranger}; leave the flag"):
            settle(way(folders.write(stranger).packed, name.upper()))


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_name_starts_no_process(folders: Folders, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_model, "Session", lambda *given: pytest.fail("a process is started"))
    reason = NAMES[name].refused
    for asked in (name, name.upper()):
        with pytest.raises(ConfigError) as from_llm:
            LLM(str(folders.plain("llama")), quantization=asked)
        with pytest.raises(ConfigError) as from_cli:
            from_command_line(folders.plain("llama"), asked)
        assert reason in str(from_llm.value)
        assert reason in str(from_cli.value)


def save_reward(folder: Path) -> None:
    save_reward_model(folder, "Qwen2ForRewardModel")


CLASSIFIERS: dict[str, tuple[Callable[[Path], object], set[str]]] = {
    "llama": (POOLERS["llama-classes"].save, {"score"}),
    "reward": (save_reward, {"score.0", "score.2"}),
    "roberta": (POOLERS["roberta-classes"].save, {"classifier.dense", "classifier.out_proj"}),
    "bert": (POOLERS["bert-classes"].save, {"bert.pooler.dense", "classifier"}),
}


@pytest.mark.parametrize("name", ["fp8", "bitsandbytes"])
@pytest.mark.parametrize("model", CLASSIFIERS)
def test_output_layers_of_classifiers_stay_while_a_checkpoint_is_quantized(
    tmp_path: Path, model: str, name: str
) -> None:
    save, outputs = CLASSIFIERS[model]
    save(tmp_path)
    said = {"quantization_config": NAMES[name].of_16_bits}
    linears = load_model(tmp_path, overrides=json.dumps(said)).linears()
    dense = {part.name for one in linears if not isinstance(one.method, KeptLinear) for part in one.spec.parts}
    assert dense == outputs
    assert len(linears) > 2 * len(outputs)

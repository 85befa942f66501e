"""Checkpoints of GPTQ against the numbers that they stand for.

The layout is written here as AutoGPTQ's `QuantLinear.pack` documents it (auto_gptq/nn_modules/qlinear), code by code.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gptq_files import Layout, named, write_gptq
from packed_words import in_marlin_order
from quantized_checkpoint import EVEN, Checkpoints, Sample, Stored, check_logits, logits, write_projections
from safetensors.torch import load_file, save_file
from tiny_models import BY_NAME, settings, start
from torch import Tensor

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.loading.linear_spec import Shard, Split, part
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.quantization.formats.gptq import GptqScheme
from blockyard.services.gpu_worker.quantization.kept import form
from blockyard.services.gpu_worker.quantization.kept.form import KeptLinear
from blockyard.services.gpu_worker.quantization.quantized_format import CutLinear
from blockyard.shared.errors import ConfigError, LoadError
from blockyard.shared.quantization.files import read_quantization

CPU = torch.device("cpu")


def forms(runner: Any) -> set[str]:
    return {linear.method.form for linear in runner.model.linears()}


def write_marlin(folder: Path) -> Checkpoints:
    def draw(outputs: int, inputs: int) -> Stored:
        codes, scales = torch.randint(0, 16, (inputs, outputs)), (torch.rand(inputs // 32, outputs) * 0.03).half()
        words, ordered = in_marlin_order(codes, scales)
        return {"B": words, "s": ordered}, ((codes - 8) * scales.float().repeat_interleave(32, 0)).t()

    return write_projections(folder, EVEN, {"quant_method": "marlin", "bits": 4, "group_size": 32}, draw)


SAMPLES = {
    "gptq": Sample(lambda folder: write_gptq(folder, "llama", Layout(sym=False))),
    "marlin": Sample(write_marlin),
}


@pytest.mark.parametrize("model", ["llama", "mixtral", "qwen3-moe", "deepseek-v3"])
@pytest.mark.parametrize("layout", [Layout(), Layout(sym=False), Layout(bits=8, sym=False, version=2)])
def test_logits(tmp_path: Path, model: str, layout: Layout) -> None:
    runner = check_logits(write_gptq(tmp_path, model, layout))
    assert forms(runner) - {None} == {"W4A16" if layout.bits == 4 else "W8A16", "dense"}


@pytest.mark.parametrize("model", ["llama", "mixtral"])
@pytest.mark.parametrize("layout", [Layout(group=32, sym=False), Layout(group=32, act_order=True)])
def test_a_model_in_bfloat16_is_multiplied_in_4_bits(tmp_path: Path, model: str, layout: Layout) -> None:
    made = write_gptq(tmp_path, model, layout)
    plain, packed = (start(folder, max_model_len=64, dtype="bfloat16") for folder in (made.plain, made.packed))
    kept = [linear.method for linear in packed.model.linears() if linear.method.form == "W4A16"]
    assert kept
    assert all(0 < one.size_bytes < one.shape[0] * one.shape[1] for one in kept)
    assert not any("CPU has no product" in line for line in packed.model.table.describe_unused())
    got, want = logits(packed).float(), logits(plain).float()
    of_tokens = (got - want).std(1) / want.std(1)
    assert float(of_tokens.median()) < 0.03  # of single tokens a tie of the router may fall otherwise


@pytest.mark.parametrize(
    "layout",
    [
        Layout(group=-1),
        Layout(group=40),  # does not divide the inputs
        Layout(sym=False, version=2),
        Layout(version=2),
        Layout(version=2, said_version=1),
        Layout(version=1, said_version=2),
        Layout(bits=8),
        Layout(bits=8, group=-1, sym=False),
        Layout(bits=8, version=2, said_version=1),
    ],
)
def test_layouts(tmp_path: Path, layout: Layout) -> None:
    runner = check_logits(write_gptq(tmp_path, "llama", layout))
    assert forms(runner) == {"W4A16" if layout.bits == 4 else "W8A16", "dense"}


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("fields", [{}, {"sym": False}, {"sym": False, "act_order": True}])
def test_widths_without_a_form_are_dequantized(tmp_path: Path, bits: int, fields: dict[str, Any]) -> None:
    runner = check_logits(write_gptq(tmp_path, "mixtral", Layout(bits=bits, group=32, **fields)))
    assert forms(runner) == {"dense"}
    assert any(line.startswith("dequantized at load: ") for line in runner.model.table.describe_unused())


@pytest.mark.parametrize("layout", [Layout(act_order=True), Layout(bits=8, sym=False, act_order=True)])
def test_act_order(tmp_path: Path, layout: Layout) -> None:
    """Matrices with the same inputs have orders of their own, and so products of their own."""
    runner = check_logits(write_gptq(tmp_path, "llama", layout))
    methods = [linear.method for linear in runner.model.linears()]
    assert {len(one.methods) for one in methods if isinstance(one, CutLinear)} == {2, 3}
    assert not any("dequantized at load" in line for line in runner.model.table.describe_unused())


@pytest.mark.parametrize(("model", "group"), [("mixtral", 16), ("mixtral", -1), ("deepseek-v3", 16)])
def test_act_order_of_experts(tmp_path: Path, model: str, group: int) -> None:
    """They share memory, so that they have no orders of their own; one group needs none."""
    runner = check_logits(write_gptq(tmp_path, model, Layout(group=group, act_order=True)))
    lines = [line for line in runner.model.table.describe_unused() if line.startswith("dequantized at load")]
    assert any(".experts." in line for line in lines) == (group > 0)


def test_dynamic_rules(tmp_path: Path) -> None:
    layout = Layout()
    rules = {
        "layers.0.mlp.down_proj": Layout(bits=8),
        "layers.1.self_attn.k_proj": None,
        "layers.1.mlp": Layout(group=32, sym=False),
        "layers.2.self_attn.o_proj": Layout(act_order=True),
    }
    dynamic = {
        r"-:.*\.1\.self_attn\.k_proj": {},
        r"+:.*\.0\.mlp\.down_proj": {"bits": 8},
        r".*layers\.1\.mlp\..*": {"group_size": 32, "sym": False},
        r".*\.2\..*o_proj": {"desc_act": True},
    }
    runner = check_logits(write_gptq(tmp_path, "llama", layout, rules, dynamic=dynamic))
    assert forms(runner) == {"W4A16", "W8A16", "dense", None}
    notes = runner.model.table.describe_unused()
    assert "products that are cut because their parts are not quantized alike: model.layers.1.self_attn.q_proj" in notes


def test_rules_that_match_nothing_are_named(tmp_path: Path) -> None:
    dynamic: dict[str, dict[str, Any]] = {r"-:.*vision.*": {}, r".*mlp.*": {"bits": 4}, r"+:.*\.9\..*": {"bits": 8}}
    notes = start(write_gptq(tmp_path, "llama", Layout(), dynamic=dynamic).packed).model.table.describe_unused()
    assert r"quantization_config names what the model does not have: -:.*vision.*, +:.*\.9\..*" in notes


def test_a_quantized_head_and_layers_that_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    like = BY_NAME["llama"]
    monkeypatch.setitem(BY_NAME, "llama-216", replace(like, fields=like.fields | {"vocab_size": 216}))
    layout, names = Layout(), [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.down_proj"]]
    rules = {"lm_head": layout, "v_proj": None, "o_proj": None, "gate_proj": None, "up_proj": None}
    made = write_gptq(tmp_path, "llama-216", layout, rules, lm_head=True, modules_in_block_to_quantize=names)
    runner = check_logits(made)
    assert runner.model.linears()[-1].method.form == "W4A16"


def test_biases_of_models_without_them_are_not_used(tmp_path: Path) -> None:
    made = write_gptq(tmp_path, "mixtral", Layout())
    file = made.packed / "model.safetensors"
    tensors = load_file(file)
    names = [name.removesuffix("scales") for name in tensors if name.endswith("scales")]
    save_file(tensors | {f"{name}bias": torch.zeros(tensors[f"{name}scales"].shape[1]) for name in names}, file)
    lines = check_logits(made).model.table.describe_unused()
    assert any(line.startswith("not used: ") and "of q_proj.bias" in line for line in lines)


def test_dummy_weights(tmp_path: Path) -> None:
    for layout in (Layout(sym=False), Layout(bits=8, act_order=True), Layout(bits=2)):
        made = write_gptq(tmp_path / str(layout), "llama", layout)
        runner = engine.start(settings(made.packed, load_format="dummy"), lambda phase, progress, notes: None)
        assert torch.isfinite(logits(runner)).all()
        for linear in runner.model.linears()[:-1]:
            assert 0.015 < float(linear.method.apply(torch.eye(linear.shape[0])).std()) < 0.025


@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("act_order", [False, True])
def test_shares_of_ranks(split: Split, act_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "is_dequantized_on", lambda device, kept: False)
    layout = Layout(group=8, sym=False, act_order=act_order)
    parts, stored, numbers = [part("h.0.a", 16, 2), part("h.0.b", 8, 2, lambda rows: rows.flip(0))], {}, []
    for one in parts:
        tensors, own = layout.draw(one.size, 32)
        stored |= named(one.name, tensors)
        numbers.append(own.flip(0) if one.name.endswith("b") else own)
    whole, x = torch.cat(numbers), torch.randn(3, 32)
    for rank in range(2):
        table = WeightTable(torch.float32, CPU, shard=Shard(rank, 2))
        linear = LinearLayers(table, {"quantization_config": layout.config()}).make(parts, 32, split=split)
        for name in sorted(stored, key=lambda name: name[::-1]):
            table.put(name, stored[name])
        table.check_complete()
        outputs, inputs = torch.arange(24), torch.arange(32)
        if split is Split.OUTPUTS:
            outputs = torch.cat((outputs[:16][8 * rank : 8 * rank + 8], outputs[16:][4 * rank : 4 * rank + 4]))
        elif split is Split.INPUTS:
            inputs = inputs[16 * rank : 16 * rank + 16]
        want = F.linear(x[:, inputs], whole[outputs][:, inputs])
        torch.testing.assert_close(linear(x[:, inputs]), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "said", [{"checkpoint_format": "marlin"}, {"is_marlin_format": True}, {"quant_method": "marlin"}]
)
@pytest.mark.parametrize("group", [32, -1])
def test_the_order_of_marlin(said: dict[str, Any], group: int) -> None:
    codes, groups = torch.randint(0, 16, (64, 128)), 1 if group < 0 else 64 // group
    scales = torch.rand(groups, 128).half()
    words, ordered = in_marlin_order(codes, scales)
    config = Layout(group=group).config() | said
    table = WeightTable(torch.float32, CPU)
    linear = LinearLayers(table, {"quantization_config": config}).make([part("h.0.a", 128)], 64)
    table.put("h.0.a.B", words)
    table.put("h.0.a.s", ordered)
    table.check_complete()
    assert isinstance(linear.method, KeptLinear)
    want = (codes - 8) * scales.float().repeat_interleave(64 // groups, 0)
    torch.testing.assert_close(linear.method.dequantized(), want.t())


def change(made: Checkpoints, suffix: str, value: Any) -> str:
    """Changes the first tensor whose name ends so; value: of the tensor, None takes it away. Returns its name."""
    file = made.packed / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if name.endswith(suffix))
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value(tensors[name])
    save_file(tensors, file)
    return name


def set_first(number: float) -> Any:
    def changed(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = number
        return tensor

    return changed


@pytest.mark.parametrize(
    ("layout", "suffix", "value", "error"),
    [
        (Layout(), ".scales", None, "the checkpoint lacks {}$"),
        (Layout(sym=False), "experts.1.w2.qzeros", None, "the checkpoint lacks {}$"),
        (Layout(act_order=True), ".g_idx", None, "the checkpoint lacks {}$"),
        (Layout(), ".scales", set_first(float("nan")), "{}: the checkpoint has a scale of nan"),
        (Layout(), ".qzeros", set_first(0), "{}: a symmetric matrix has zeros of 0 to 7, expected 7 or 8"),
        (Layout(), ".g_idx", set_first(-1), "{}: the checkpoint has group -1, expected 0 to 3"),
        (Layout(act_order=True), "q_proj.g_idx", set_first(9), "{}: the checkpoint has group 9, expected 0 to 3"),
        (Layout(act_order=True), ".g_idx", torch.zeros_like, "{}: .* groups of other sizes than 16 inputs"),
        (Layout(), ".g_idx", lambda own: own.flip(0), "{}: .* another order, but desc_act is false"),
        (Layout(), ".qweight", lambda own: own[1:].clone(), r"{}: .* has \[7, \d+\], config.json means \[8, \d+\]"),
        (Layout(), ".qweight", lambda own: own.short(), "{}: the checkpoint has int16, expected int32"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_named(tmp_path: Path, layout: Layout, suffix: str, value: Any, error: str) -> None:
    made = write_gptq(tmp_path, "mixtral", layout)
    name = change(made, suffix, value)
    with pytest.raises(LoadError, match=error.format(name.replace(".", "[.]"))):
        start(made.packed)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"bits": 5}, "bits 5 is none of 2, 3, 4, 8"),
        ({"group_size": 0}, "group_size 0: it is -1 or at least 1"),
        ({"checkpoint_format": "bitblas"}, "checkpoint_format 'bitblas' is none of gptq, gptq_v2, marlin"),
        ({"checkpoint_format": "marlin", "bits": 8}, "bits 8: weights in Marlin's order have 4"),
        ({"sym": "yes"}, 'config.json: quantization_config: sym is "yes": Expected `bool`'),
        ({"dynamic": {"(": {}}}, r"'\(' is not a regular expression"),
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        GptqScheme({"quant_method": "gptq", **fields}, torch.float32)


@pytest.mark.parametrize(
    ("size", "inputs", "fields", "error"),
    [
        (8, 36, {}, "h.0.a has 36 inputs; a multiple of 8 is needed"),
        (12, 32, {}, "h.0.a has 12 outputs; a multiple of 8 is needed"),
        (40, 32, {"bits": 3}, "h.0.a has 40 outputs; a multiple of 32 is needed"),
        (72, 32, {"checkpoint_format": "marlin"}, "h.0.a has 72 outputs; a multiple of 64 is needed"),
        (64, 48, {"checkpoint_format": "marlin", "group_size": 32}, "h.0.a has 48 inputs; a multiple of 32 is needed"),
        (8, 32, {"dynamic": {"h.0": {"bits": 7}}}, "bits 7 is none of"),
    ],
)
def test_sizes_that_do_not_fit_are_named(size: int, inputs: int, fields: dict[str, Any], error: str) -> None:
    table = WeightTable(torch.float32, torch.device("meta"))
    with pytest.raises(ConfigError, match=error):
        layers = LinearLayers(table, {"quantization_config": Layout().config() | fields})
        layers.make([part("h.0.a", size)], inputs)


def test_older_files_say_it_in_a_file_of_their_own(tmp_path: Path) -> None:
    """quantize_config.json; the launcher passes on what it says."""
    made = write_gptq(tmp_path, "llama", Layout(sym=False))
    config = json.loads((made.packed / "config.json").read_text())
    said = config.pop("quantization_config")
    (made.packed / "config.json").write_text(json.dumps(config))
    del said["quant_method"], said["checkpoint_format"]
    (made.packed / "quantize_config.json").write_text(json.dumps(said))
    found = read_quantization(made.packed, config).said
    overrides = json.dumps({"quantization_config": found})
    packed = start(made.packed, max_model_len=64, config_overrides=overrides)
    torch.testing.assert_close(logits(packed), logits(start(made.plain, max_model_len=64)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("names", [("", ""), ("", "language_model."), ("model.", "model.language_model.")])
def test_a_text_part_may_say_it(tmp_path: Path, names: tuple[str, str]) -> None:
    """names: what the names of weights begin with in place of what."""
    said = {"dynamic": {r"-:model\.language_model\.layers\.0\..*q_proj": {}}}
    made = write_gptq(tmp_path, "llama", Layout(), {"layers.0.self_attn.q_proj": None}, **said)
    text = json.loads((made.packed / "config.json").read_text())
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text | {"model_type": "mistral"}}
    (made.packed / "config.json").write_text(json.dumps(config))
    tensors = load_file(made.packed / "model.safetensors")
    before, now = names
    renamed = {now + one.removeprefix(before) if one.startswith(before) else one: tensors[one] for one in tensors}
    save_file(renamed, made.packed / "model.safetensors")
    check_logits(made)

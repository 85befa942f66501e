"""Checkpoints that the package compressed-tensors writes, against the numbers that it reads from them again."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_files import (
    FLOAT,
    INPUT_SCALE,
    INPUT_ZERO,
    INT,
    MXFP4,
    MXFP8,
    NAIVE,
    NVFP4,
    PACK,
    packed,
    scheme,
    write_packed,
)
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from compressed_tensors.transform import TransformArgs, TransformConfig, TransformScheme
from quantized_checkpoint import Sample, check_logits, is_projection, logits, write
from safetensors.torch import load_file, save_file
from tiny_models import start
from torch import Tensor, nn

from blockyard.services.gpu_worker.quantization.formats.compressed_tensors import CompressedTensorsScheme
from blockyard.services.gpu_worker.quantization.kept.form import KeptLinear
from blockyard.services.gpu_worker.quantization.quantized_format import CutLinear
from blockyard.shared.errors import ConfigError, LoadError

MODELS = ("llama", "mixtral", "deepseek-v3")
FP4 = {"num_bits": 4, "type": "float"}
FP8 = {"num_bits": 8, "type": "float"}
TOKEN = {"strategy": "token", "dynamic": True}
STATIC = {"strategy": "tensor"}
BLOCK = [16, 32]


def cases(kinds: Iterable[str], everywhere: tuple[str, ...]) -> list[tuple[str, str]]:
    """Models and kinds: some kinds of all models, the others of the dense one."""
    return [(model, kind) for kind in kinds for model in (MODELS if kind in everywhere else MODELS[:1])]


WEIGHT_ONLY = {
    "4 bits, groups": (PACK, {"num_bits": 4, "group_size": 32}, "W4A16"),
    "4 bits, groups with zeros": (PACK, {"num_bits": 4, "group_size": 4, "symmetric": False}, "W4A16"),
    "4 bits, rows with zeros": (PACK, {"num_bits": 4, "strategy": "channel", "symmetric": False}, "W4A16"),
    "4 bits, one scale": (PACK, {"num_bits": 4, "strategy": "tensor"}, "W4A16"),
    "8 bits, groups with zeros": (PACK, {"num_bits": 8, "group_size": 4, "symmetric": False}, "W8A16"),
    "6 bits, rows": (PACK, {"num_bits": 6, "strategy": "channel"}, "W8A16"),
    "5 bits, groups with zeros": (PACK, {"num_bits": 5, "group_size": 4, "symmetric": False}, "W8A16"),
    "3 bits, groups": (PACK, {"num_bits": 3, "group_size": 32}, "W8A16"),
    "int8, one by one": (NAIVE, {"num_bits": 8, "strategy": "channel"}, "W8A16"),
    "fp8, one by one": (NAIVE, FP8 | {"strategy": "channel"}, "W8A16"),
    "nvfp4": (
        NVFP4,
        FP4 | {"strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn},
        "Table4A16",
    ),
    "mxfp4": (MXFP4, FP4 | {"group_size": 32, "scale_dtype": torch.uint8}, "Table4A16"),
    "mxfp8": (MXFP8, FP8 | {"group_size": 32, "scale_dtype": torch.uint8}, "W8A16"),
}


WORDS = scheme({"num_bits": 4, "group_size": 32})
SAMPLES = {"compressed-tensors": Sample(lambda folder: write_packed(folder, "llama", PACK, WORDS))}


@pytest.mark.parametrize(
    ("model", "kind"), cases(WEIGHT_ONLY, ("4 bits, groups with zeros", "fp8, one by one", "nvfp4"))
)
def test_weights_alone(tmp_path: Path, model: str, kind: str) -> None:
    format_, weights, form = WEIGHT_ONLY[kind]
    runner = check_logits(write_packed(tmp_path, model, format_, scheme(weights)))
    kinds = {one.method.form for one in runner.model.linears()}
    assert form in kinds
    assert kinds <= {form, "dense", None}


ROUNDED = {
    "int8 by row": (INT, {"strategy": "channel"}, TOKEN),
    "int8, one scale of weights": (INT, {"strategy": "tensor"}, TOKEN),
    "int8 by row with zeros": (INT, {"strategy": "channel"}, TOKEN | {"symmetric": False}),
    "static int8": (INT, {"strategy": "channel"}, STATIC),
    "static int8 with zeros": (INT, {"strategy": "channel"}, STATIC | {"symmetric": False}),
    "fp8 by row": (FLOAT, FP8 | {"strategy": "channel"}, FP8 | TOKEN),
    "static fp8": (FLOAT, FP8 | {"strategy": "tensor"}, FP8 | STATIC),
    "fp8 blocks": (
        FLOAT,
        FP8 | {"strategy": "block", "block_structure": BLOCK},
        FP8 | {"strategy": "group", "group_size": BLOCK[1], "dynamic": True},
    ),
}


def rounding(args: QuantizationArgs) -> Callable[[Tensor], Tensor]:
    """What the package makes of inputs. It has no incomplete groups, and no rows of zeros."""

    def round_inputs(x: Tensor) -> Tensor:
        if args.dynamic:
            if args.symmetric and args.type == "int":  # by 127, where the package has 127.5
                scale = x.abs().amax(1, keepdim=True) / 127
                return torch.round(x / scale) * scale
            missing = -x.shape[1] % (args.group_size or 1)
            padded = nn.functional.pad(x, (0, missing))
            scale, zero = compute_dynamic_scales_and_zp(padded[None], args, nn.Linear(1, 1))
            made: Tensor = fake_quantize(padded[None], scale, zero, args)[0, :, : x.shape[1]]
            return made
        zero = torch.tensor([0 if args.symmetric else INPUT_ZERO], dtype=args.pytorch_dtype())
        static: Tensor = fake_quantize(x, torch.tensor([INPUT_SCALE]), zero, args)
        return static

    return round_inputs


@pytest.mark.parametrize(("model", "kind"), cases(ROUNDED, ("int8 by row", "static int8 with zeros", "fp8 blocks")))
def test_rounded_inputs(tmp_path: Path, model: str, kind: str) -> None:
    format_, weights, inputs = ROUNDED[kind]
    own = scheme(weights, inputs)
    runner = check_logits(write_packed(tmp_path, model, format_, own), rounding(own.input_activations))
    form = "Int8W8A8" if format_ == INT else "Fp8W8A8"
    assert form in {one.method.form for one in runner.model.linears()}


@pytest.mark.parametrize("bits", [4, 8])
def test_inputs_in_groups_of_any_others(tmp_path: Path, bits: int) -> None:
    """Act order: a file's `weight_g_idx` gives the group of each input, of codes in the order of the inputs."""
    own = scheme({"num_bits": bits, "group_size": 32})
    order = {columns: torch.randperm(columns, generator=torch.Generator().manual_seed(columns)) for columns in (64, 96)}

    def store(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not is_projection(name):
            return None
        columns = weight.shape[1]
        stored, numbers = packed(PACK, own, weight)
        groups = torch.arange(columns) // 32
        codes = unpack_from_int32(stored["weight_packed"], bits, weight.shape)
        back = order[columns].argsort()
        stored["weight_packed"] = pack_to_int32(codes[:, back].contiguous(), bits)
        stored["weight_g_idx"] = groups[back].int()
        return {f"{name}.{key}": value for key, value in stored.items()}, numbers[:, back]

    config = json.loads(QuantizationConfig(config_groups={"a": own}, format=PACK, ignore=["lm_head"]).model_dump_json())
    config["config_groups"]["a"]["weights"]["actorder"] = "group"  # the package has removed the word
    check_logits(write(tmp_path, "llama", store, {"config.json": {"quantization_config": config}}))


def test_groups_of_one_file_may_differ(tmp_path: Path) -> None:
    """Names count before expressions, and these before classes; parts of one product in other forms are cut."""
    groups = {
        "classes": (PACK, {"num_bits": 4, "group_size": 32}, ["Linear"]),
        "expressions": (PACK, {"num_bits": 8, "strategy": "channel"}, [r"re:.*layers\.1\.mlp.*_proj", "re:.*k_proj"]),
        "names": (NAIVE, FP8 | {"strategy": "channel"}, ["model.layers.1.mlp.down_proj", "model.layers.7"]),
    }
    made = {
        key: (format_, QuantizationScheme(targets=targets, weights=QuantizationArgs(**args), format=format_))
        for key, (format_, args, targets) in groups.items()
    }

    def store(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not is_projection(name) or name == "model.layers.0.self_attn.o_proj":
            return None
        key = "expressions" if "layers.1.mlp" in name or name.endswith("k_proj") else "classes"
        stored, numbers = packed(*made["names" if name == "model.layers.1.mlp.down_proj" else key], weight)
        return {f"{name}.{key}": value for key, value in stored.items()}, numbers

    config = QuantizationConfig(
        config_groups={key: own for key, (_, own) in made.items()},
        format="mixed-precision",
        ignore=["lm_head", "re:.*layers.0.self_attn.o_proj", "vision_tower"],
    )
    quantization = json.loads(config.model_dump_json())
    packed_one = write(tmp_path, "llama", store, {"config.json": {"quantization_config": quantization}})
    runner = check_logits(packed_one)
    cuts = [one.method for one in runner.model.linears() if isinstance(one.method, CutLinear)]
    assert {tuple(one.form for one in cut.methods) for cut in cuts} == {("W4A16", "W8A16", "W4A16")}
    notes = runner.model.table.describe_unused()
    assert "quantization_config names what the model does not have: vision_tower, model.layers.7" in notes, notes


def test_a_head_is_a_linear_layer(tmp_path: Path) -> None:
    own = scheme({"num_bits": 8, "strategy": "channel"})

    def store(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not is_projection(name) and name != "lm_head":
            return None
        stored, numbers = packed(PACK, own, weight)
        return {f"{name}.{key}": value for key, value in stored.items()}, numbers

    config = json.loads(QuantizationConfig(config_groups={"a": own}, format=PACK).model_dump_json())
    check_logits(write(tmp_path, "llama", store, {"config.json": {"quantization_config": config}}))


@pytest.mark.parametrize(("format_", "weights"), [(PACK, {"num_bits": 4, "group_size": 32}), (INT, {"group_size": 32})])
def test_inputs_of_groups_stay_as_they_are(tmp_path: Path, format_: str, weights: dict[str, Any]) -> None:
    runner = check_logits(write_packed(tmp_path, "llama", format_, scheme(weights, TOKEN)))
    assert any("stay 16 bits" in note for note in runner.model.table.describe_unused())


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("weight_packed", None, "the checkpoint lacks model.layers.1.self_attn.k_proj.weight_packed"),
        ("weight_scale", None, "the checkpoint lacks model.layers.1.self_attn.k_proj.weight_scale"),
        ("weight_packed", torch.zeros(32, 7, dtype=torch.int32), r"the checkpoint has \[32, 7\], config.json means"),
        ("weight_packed", torch.zeros(32, 8), "float32, expected int32"),
        ("weight_shape", torch.tensor([32, 65]), r"the checkpoint has \[32, 65\], config.json means \[32, 64\]"),
        ("weight_scale", torch.full((32, 2), torch.inf), "a scale of inf"),
        ("weight_g_idx", torch.full((64,), 9, dtype=torch.int32), "weight_g_idx: the checkpoint has group 9, expected"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, key: str, value: Tensor | None, error: str) -> None:
    own = scheme({"num_bits": 4, "group_size": 32})

    def change(name: str, stored: dict[str, Tensor]) -> None:
        if key == "weight_g_idx":
            stored[key] = torch.arange(64 if "down" not in name else 96, dtype=torch.int32) // 32
        if name != "model.layers.1.self_attn.k_proj":
            return
        if value is None:
            del stored[key]
        else:
            stored[key] = value

    made = write_packed(tmp_path, "llama", PACK, own, change)
    if key == "weight_g_idx":
        file = made.packed / "config.json"
        config = json.loads(file.read_text())
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = "group"
        file.write_text(json.dumps(config))
    with pytest.raises(LoadError, match=error):
        start(made.packed)


def transforms(*locations: str) -> dict[str, Any]:
    """`transform_config` as compressed-tensors writes it."""
    args = [TransformArgs(targets=["Linear"], location=one) for one in locations]
    return TransformConfig(config_groups={"R1": TransformScheme(type="hadamard", apply=args)}).model_dump(mode="json")


def made_scheme(**said: Any) -> CompressedTensorsScheme:
    return CompressedTensorsScheme(said, torch.float32, torch.device("cpu"), lambda what, name: None)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"format": "marlin-24"}, "format 'marlin-24' is refused: it needs kernels of sparse weights"),
        ({"format": "tight"}, "format 'tight' is none of pack-quantized"),
        (
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config: format 'sparse-24-bit.* is refused",
        ),
        ({"ignore": "lm_head"}, 'ignore is "lm_head": Expected `array`'),
        ({"config_groups": {"W8A8": ["Linear"]}}, "Expected `object`"),
        ({"config_groups": {"a": {"targets": [], "weights": {"num_bits": 9}}}}, "num_bits 9: 2 to 8 are read"),
        ({"config_groups": {"a": {"targets": [], "weights": {"group_size": 0, "strategy": "group"}}}}, "group_size 0"),
        ({"config_groups": {"a": {"targets": [], "weights": {"strategy": "dots"}}}}, "strategy 'dots' is none of"),
        ({"config_groups": {"a": {"targets": [], "weights": {}}}}, "config_groups a has no format"),
        ({"config_groups": {"a": {"targets": ["re:("], "format": PACK}}}, "not a regular expression"),
        ({"config_groups": {"a": {"targets": [], "weights": {"type": "float", "num_bits": 6}}}}, "floats of 6 bits"),
        ({"transform_config": transforms("weight_input", "input")}, "transform_config: R1: a transform of the input"),
    ],
)
def test_wrong_settings_are_refused(said: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        made_scheme(**said)


def test_transforms_of_weights_are_in_them() -> None:
    made_scheme(transform_config=transforms("weight_input", "weight_output"))


def test_groups_that_do_not_divide_the_inputs_are_refused(tmp_path: Path) -> None:
    made = write_packed(tmp_path, "llama", PACK, scheme({"num_bits": 4, "group_size": 32}))
    overrides = {"quantization_config": {"config_groups": {"group_0": {"weights": {"group_size": 48}}}}}
    with pytest.raises(ConfigError, match=r"group_size 48: model\.layers\.0\..* has 64 inputs"):
        start(made.packed, config_overrides=json.dumps(overrides))


@pytest.mark.parametrize("kind", ["int8 by row", "static int8 with zeros"])
def test_dummy_weights(tmp_path: Path, kind: str) -> None:
    format_, weights, inputs = ROUNDED[kind]
    made = write_packed(tmp_path, "mixtral", format_, scheme(weights, inputs))
    assert torch.isfinite(logits(start(made.packed, load_format="dummy", max_model_len=64))).all()


def test_of_static_ranges_in_a_product_the_widest_counts(tmp_path: Path) -> None:
    own = scheme({"strategy": "channel"}, STATIC | {"symmetric": False})
    made = write_packed(tmp_path, "llama", INT, own)
    file = made.packed / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith(("k_proj.input_scale", "up_proj.input_scale")):
            tensors[name] /= 4
    save_file(tensors, file)
    check_logits(made, rounding(own.input_activations))
    packed_one = start(made.packed, max_model_len=64)
    assert all(isinstance(one.method, KeptLinear) for one in packed_one.model.linears()[:4])

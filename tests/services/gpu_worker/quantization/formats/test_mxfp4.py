"""Weights in mxfp4 against the format's definition, value by value, and whole checkpoints with them."""

import json
from pathlib import Path

import pytest
import torch
from plan_driver import Driver
from quantized_checkpoint import Checkpoints, Sample, check_logits
from safetensors.torch import load_file, save_file
from tiny_models import BY_NAME, start
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.moe.expert_weights import stacked_experts
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.registry import find_family
from blockyard.services.gpu_worker.parallel.shares import WHOLE, Shard
from blockyard.services.gpu_worker.quantization.formats import mxfp4
from blockyard.services.gpu_worker.quantization.kept.table4_a16 import CODES, SCALES
from blockyard.shared.errors import ConfigError, LoadError
from blockyard.shared.messages import Sampling

QUANTIZATION = {"quantization_config": {"quant_method": "mxfp4"}}


def write_mxfp4(folder: Path) -> Checkpoints:
    """A tiny checkpoint in bfloat16, and the same model with its experts in mxfp4."""
    made = Checkpoints(folder / "plain", folder / "packed")
    BY_NAME["gpt-oss"].save(made.plain)
    config = json.loads((made.plain / "config.json").read_text())
    files = list(made.plain.glob("*.safetensors"))
    tensors = {key: value for file in files for key, value in load_file(file).items()}
    for file in [*files, *made.plain.glob("*.index.json")]:
        file.unlink()
    torch.manual_seed(4)
    packed = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, size, out = packed.pop(name).shape
        blocks = torch.randint(256, (experts, out, size // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 126, (experts, out, size // 32), dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    made.packed.mkdir()
    save_file(tensors, made.plain / "model.safetensors")
    save_file(packed, made.packed / "model.safetensors")
    (made.packed / "config.json").write_text(json.dumps(config | QUANTIZATION))
    return made


NULLED = '{"quantization_config": null}'


def value_of(code: int, scale: int) -> float:
    """As the format defines it: e2m1, subnormal where the exponent is 0, times 2 ** (scale - 127)."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = 0.5 * mantissa if exponent == 0 else (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1)
    return (-size if sign else size) * 2.0 ** (scale - 127)


def numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """What a matrix with these bytes is multiplied as, float32."""
    kept = {CODES: blocks.flatten(-2), SCALES: scales.view(torch.float8_e8m0fnu)}
    return mxfp4.FORM.dequantize(kept, 2 * blocks[0].numel(), torch.float32)


SAMPLES = {"mxfp4": Sample(write_mxfp4)}


def test_every_code_and_scale() -> None:
    """Bytes 0 to 255 have every pair of codes. The smallest and largest scales here are those of normal bfloat16."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(240, 16, 16)
    scales = torch.arange(4, 244, dtype=torch.uint8).view(240, 1).expand(240, 16).contiguous()
    want = [
        [value_of(code, scale) for byte in range(256) for code in (byte & 15, byte >> 4)] for scale in range(4, 244)
    ]
    assert torch.equal(numbers(blocks, scales).double(), torch.tensor(want, dtype=torch.float64))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return write_mxfp4(tmp_path_factory.mktemp("mxfp4"))


def table_of(folder: Path) -> WeightTable:
    config = json.loads((folder / "config.json").read_text())
    table = WeightTable(torch.float32, torch.device("cpu"))
    find_family(config)(config, table)
    return table


def test_a_matrix_in_mxfp4_is_the_one_that_transformers_decodes(folders: Checkpoints) -> None:
    """Which gives [experts, inputs, outputs]."""
    plain, packed = (load_file(one / "model.safetensors") for one in (folders.plain, folders.packed))
    stacks = [name.removesuffix("_blocks") for name in packed if name.endswith("_blocks")]
    assert len(stacks) == 2 * 3
    for name in stacks:
        for want, blocks, scales in zip(plain[name], packed[f"{name}_blocks"], packed[f"{name}_scales"], strict=True):
            assert torch.equal(numbers(blocks, scales).T, want)


def output(folder: Path, **fields: object) -> list[int]:
    driver = Driver(start(folder, **fields))
    stream = driver.add([5, 9, 3], Sampling(max_tokens=8, temperature=0.0, ignore_eos=True))
    driver.run()
    return stream.output


def test_ranks_have_some_experts_whole(folders: Checkpoints) -> None:
    config = json.loads((folders.packed / "config.json").read_text())
    stored = load_file(folders.packed / "model.safetensors")
    prefix, num, hidden = "model.layers.0.mlp.experts", config["num_local_experts"], config["hidden_size"]
    found: list[list[Tensor]] = []
    for shard in (WHOLE, Shard(0, 2), Shard(1, 2)):
        table = WeightTable(torch.float32, torch.device("cpu"), shard=shard)
        table.spreads_experts = True
        names, sizes = (f"{prefix}.gate_up_proj", f"{prefix}.down_proj"), (num, hidden, config["intermediate_size"])
        made = stacked_experts(LinearLayers(table, config), *names, *sizes, transposed=True, in_pairs=True, bias=True)
        for name in (name for name in stored if name.startswith(prefix)):
            table.put(name, stored[name])
        table.check_complete()
        table.finish()
        found.append(made.tensors())
    whole, first, second = found
    assert len(first[0]) == num // 2
    for one, *halves in zip(whole, first, second, strict=True):
        assert torch.equal(torch.cat(halves), one)


def test_the_same_tokens(folders: Checkpoints) -> None:
    assert output(folders.packed) == output(folders.plain)


def test_codes_are_kept(folders: Checkpoints) -> None:
    runner = check_logits(folders)
    assert any(line.startswith("Table4A16 weights") for line in runner.model.table.describe_unused())


def test_modules_to_not_convert(tmp_path: Path) -> None:
    """A layer may have experts that are not quantized."""
    made, prefix = write_mxfp4(tmp_path), "model.layers.1.mlp.experts"
    plain, packed = (load_file(one / "model.safetensors") for one in (made.plain, made.packed))
    stored = {name: value for name, value in packed.items() if not name.startswith(prefix)}
    stored |= {name: value for name, value in plain.items() if name.startswith(prefix)}
    save_file(stored, made.packed / "model.safetensors")
    names = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head", prefix, "else"]
    file = made.packed / "config.json"
    said = QUANTIZATION["quantization_config"] | {"modules_to_not_convert": names}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": said}))
    lines = check_logits(made).model.table.describe_unused()
    assert [line for line in lines if line.startswith("quantization_config")] == [
        "quantization_config names what the model does not have: else"
    ]


def test_dummy_weights(folders: Checkpoints) -> None:
    assert len(output(folders.packed, load_format="dummy")) == 8


def test_what_does_not_fit_is_refused(folders: Checkpoints) -> None:
    with pytest.raises(LoadError, match=r"a weight that the model does not: .*_(blocks|scales)"):
        start(folders.packed, config_overrides=NULLED)
    with pytest.raises(LoadError, match=r"a weight that the model does not: .*_proj"):
        start(folders.plain, config_overrides=json.dumps(QUANTIZATION))
    with pytest.raises(ConfigError, match="mxfp4 weights of 48 inputs; a multiple of 32"):
        start(folders.packed, config_overrides='{"intermediate_size": 48}')

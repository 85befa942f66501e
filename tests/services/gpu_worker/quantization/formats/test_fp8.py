"""Checkpoints in fp8 against the numbers that they stand for, with inputs rounded by a definition of their own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fp8_files import (
    BLOCK,
    E4M3,
    codes_like,
    round_groups,
    round_rows,
    round_statically,
    rounded,
    store,
    write_deepspeed,
    write_fp8,
)
from quantized_checkpoint import Sample, check_dummy_weights, check_lack, check_logits, is_projection, logits, write
from safetensors.torch import load_file, save_file
from tiny_models import BY_NAME, start
from torch import Tensor
from transformers.integrations.finegrained_fp8 import FP8Linear, _dequantize_fp8_weight

from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.routing import Routing
from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.moe import expert_weights, routed_experts
from blockyard.services.gpu_worker.loading.linear_spec import Shard, Split, part
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.quantization.formats import fp8
from blockyard.services.gpu_worker.quantization.kept import eight_bits, form
from blockyard.services.gpu_worker.quantization.kept.form import KeptExperts, KeptLinear
from blockyard.services.gpu_worker.quantization.quantized_format import CutLinear
from blockyard.shared.errors import ConfigError, LoadError

CPU = torch.device("cpu")
MODELS = ("llama", "mixtral", "qwen3-moe", "deepseek-v3")


SAMPLES = {
    "deepspeedfp": Sample(write_deepspeed, round_rows),
    "fbgemm_fp8": Sample(lambda folder: write_fp8(folder, "llama", "row", method="fbgemm_fp8"), round_rows),
    "fp8": Sample(lambda folder: write_fp8(folder, "llama", "row"), round_rows),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("scales", ["tensor", "row", "block"])
def test_logits(tmp_path: Path, model: str, scales: str) -> None:
    check_logits(write_fp8(tmp_path, model, scales), round_groups if scales == "block" else round_rows)


@pytest.mark.parametrize(("model", "method"), [("llama", "fp8"), ("mixtral", "fp8"), ("deepseek-v3", "fbgemm_fp8")])
def test_static_scales_of_inputs(tmp_path: Path, model: str, method: str) -> None:
    check_logits(write_fp8(tmp_path, model, "tensor", static=True, method=method), round_statically)


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_names_of_transformers(tmp_path: Path, scheme: str) -> None:
    """As Ministral 3 has them: one scale for all has the name of a block's."""
    made = write_fp8(tmp_path, "llama", "tensor", static=scheme == "static")
    others = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
    tensors = load_file(made.packed / "model.safetensors")
    for name in [name for name in tensors if name.endswith((*others,))]:
        head, _, last = name.rpartition(".")
        tensors[f"{head}.{others[last]}"] = tensors.pop(name)
    save_file(tensors, made.packed / "model.safetensors")
    names = {name.rpartition(".")[2] for name in tensors if name.startswith("model.layers.0.mlp.up_proj.")}
    assert names == {*FP8Linear(4, 4, activation_scheme=scheme).state_dict()}
    check_logits(made, round_statically if scheme == "static" else round_rows)


def test_of_static_scales_in_a_product_the_largest_counts(tmp_path: Path) -> None:
    made = write_fp8(tmp_path, "llama", "tensor", static=True)
    file = made.packed / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith(("k_proj.input_scale", "up_proj.input_scale")):
            tensors[name] /= 4
    save_file(tensors, file)
    check_logits(made, round_statically)


def test_a_bound_of_the_scales_of_inputs(tmp_path: Path) -> None:
    made = write_fp8(tmp_path, "llama", "row", method="fbgemm_fp8")
    change_config(made.packed, activation_scale_ub=1.2)

    def round_bounded(x: Tensor) -> Tensor:
        return rounded(x, x.abs().amax(1, keepdim=True).clamp(1e-9, 1.2) / 448)

    check_logits(made, round_bounded)


def test_gpus_without_products_of_fp8_keep_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "has_products", lambda device: False)
    runner = check_logits(write_fp8(tmp_path, "mixtral", "tensor", static=True))
    assert {linear.method.form for linear in runner.model.linears()} == {"W8A16", "dense"}
    lines = runner.model.table.describe_unused()
    assert any(line.startswith("fp8 weights, whose inputs keep 16 bits because this GPU has no fp8") for line in lines)


def test_blocks_are_those_that_transformers_reads(tmp_path: Path) -> None:
    made = write_fp8(tmp_path, "deepseek-v3", "block")
    plain, packed = (load_file(folder / "model.safetensors") for folder in (made.plain, made.packed))
    names = [name for name in packed if name.endswith("_inv")]
    assert len(names) > 20
    for name in names:
        weight = packed[name.removesuffix("_scale_inv")]
        want = _dequantize_fp8_weight(weight, packed[name], list(BLOCK), torch.float32)
        assert torch.equal(want, plain[name.removesuffix("_scale_inv")])


def change_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= fields
    file.write_text(json.dumps(config))


def test_parts_that_are_not_quantized_alike(tmp_path: Path) -> None:
    """Their product is cut; and what a file names, but has not, is said: norms are there."""
    left_out = ["re:.*layers[.]1[.]self_attn[.]k_proj", "model.layers.2.mlp", "vision_tower"]
    left_out += ["model.layers.0.input_layernorm", "model.norm", "layers.9.mlp"]

    def some(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        is_out = name.endswith("1.self_attn.k_proj") or "layers.2.mlp" in name
        return None if is_out else store("row", False, name, weight)

    said = {"quant_method": "fp8", "modules_to_not_convert": left_out}
    made = write(tmp_path, "llama", some, {"config.json": {"quantization_config": said}})
    packed = start(made.packed, max_model_len=64)
    [cut] = [one.method for one in packed.model.linears() if isinstance(one.method, CutLinear)]
    assert [one.form for one in cut.methods] == ["Fp8W8A8", "dense", "Fp8W8A8"]
    notes = packed.model.table.describe_unused()
    assert "products that are cut because their parts are not quantized alike: model.layers.1.self_attn.q_proj" in notes
    assert "quantization_config names what the model does not have: vision_tower, layers.9.mlp" in notes
    assert any("dequantized because the CPU has no product of them in float32" in line for line in notes)
    plain = start(made.plain, max_model_len=64)
    for linear, like in zip(plain.model.linears(), packed.model.linears(), strict=True):
        if isinstance(like.method, KeptLinear):
            linear.wrap(lambda product: lambda x: product(round_rows(x)))
        elif like.method is cut:
            linear.wrap(lambda product: lambda x: torch.cat(thirds(product(x), product(round_rows(x))), 1))
    torch.testing.assert_close(logits(packed), logits(plain), atol=1e-4, rtol=1e-4)


def thirds(exact: Tensor, rounded_once: Tensor) -> tuple[Tensor, ...]:
    """Outputs of q, k and v of 64, 32 and 32 rows, of which k is not quantized."""
    return rounded_once[:, :64], exact[:, 64:96], rounded_once[:, 96:]


@pytest.mark.parametrize("model", ["llama", "mixtral", "deepseek-v3"])
@pytest.mark.parametrize("block", [None, BLOCK])
def test_a_16_bit_checkpoint_is_quantized_while_it_loads(
    tmp_path: Path, model: str, block: tuple[int, int] | None
) -> None:
    """As if a file had the same codes and scales: the largest of each row or block is 448."""
    BY_NAME[model].save(tmp_path / "16")
    fields = {"quant_method": "fp8", "from_16_bits": True, "weight_block_size": block}
    overrides = json.dumps({"quantization_config": fields})
    runner = start(tmp_path / "16", max_model_len=64, config_overrides=overrides)

    def quantized(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not is_projection(name) or name.endswith("kv_b_proj"):
            return None
        if block is None:
            scale = weight.abs().amax(1, keepdim=True) / 448
            codes, whole = (weight / scale).to(E4M3), scale
        else:
            rows, columns = weight.shape
            tiles = [some.split(block[1], 1) for some in weight.split(block[0])]
            scale = torch.tensor([[float(tile.abs().max()) / 448 for tile in some] for some in tiles])
            whole = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
            codes = (weight / whole).to(E4M3)
        return {}, codes.float() * whole

    plain = start(write(tmp_path, model, quantized, {}).plain, max_model_len=64)
    rounding = round_rows if block is None else round_groups
    for linear, like in zip(plain.model.linears(), runner.model.linears(), strict=True):
        if isinstance(like.method, KeptLinear):
            linear.wrap(lambda product: lambda x: product(rounding(x)))
    torch.testing.assert_close(logits(runner), logits(plain), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("scales", ["row", "block"])
def test_shares_of_ranks(split: Split, scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts, of which the first has an incomplete last block, and rows that are rearranged with their scales."""
    monkeypatch.setattr(form, "is_dequantized_on", lambda device, kept: False)
    said = {"quant_method": "fp8"} | ({"weight_block_size": (4, 8)} if scales == "block" else {})
    parts = [part("a", 6, 2, lambda rows: rows.flip(0)), part("b", 4, 2)]
    stored, numbers = {}, []
    for one in parts:
        codes = codes_like(torch.empty(one.size, 16))
        size, suffix = ((one.size, 1), "") if scales == "row" else ((-(-one.size // 4), 2), "_inv")
        scale = torch.rand(size)
        stored |= {f"{one.name}.weight": codes, f"{one.name}.weight_scale{suffix}": scale}
        whole = scale if scales == "row" else scale.repeat_interleave(4, 0)[: one.size].repeat_interleave(8, 1)
        numbers.append((codes.float() * whole).flip(0) if one.name == "a" else codes.float() * whole)
    bias, whole = torch.randn(10), torch.cat(numbers)
    for one, own in zip(parts, bias.split([6, 4]), strict=True):
        stored[f"{one.name}.bias"] = own.flip(0) if one.name == "a" else own
    for rank in range(2):
        table = WeightTable(torch.float32, CPU, shard=Shard(rank, 2))
        linear = LinearLayers(table, {"quantization_config": said}).make(parts, 16, split=split, bias=True)
        for name in sorted(stored, key=lambda name: name[::-1]):
            table.put(name, stored[name])
        table.check_complete()
        assert isinstance(linear.method, KeptLinear)
        own, outputs, inputs = linear.method.dequantized(), [*range(10)], [*range(16)]
        if split is Split.OUTPUTS:
            outputs = [i for i in range(10) if (i % 6 // 3 if i < 6 else (i - 6) // 2) == rank]
        elif split is Split.INPUTS:
            inputs = inputs[8 * rank : 8 * rank + 8]
        torch.testing.assert_close(own, whole[outputs][:, inputs])
        x = torch.zeros(1, len(inputs))
        is_added = split is not Split.INPUTS or rank == 0
        torch.testing.assert_close(linear(x)[0], bias[outputs] * is_added)


def test_a_rank_that_would_cut_a_block_is_refused() -> None:
    table = WeightTable(torch.float32, torch.device("meta"), shard=Shard(0, 2))
    layers = LinearLayers(table, {"quantization_config": {"quant_method": "fp8", "weight_block_size": (8, 8)}})
    with pytest.raises(ConfigError, match=r"-size 2: a: inputs 0 to 11, which a rank has, are no whole groups of 8$"):
        layers.make([part("a", 8)], 24, split=Split.INPUTS)


@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize("kind", ["host", "grouped"])
def test_stacked_experts(kind: str, in_pairs: bool) -> None:
    """One tensor [experts, inputs, outputs] for all, with transformers' names."""
    hidden, inner, experts, routing = 16, 8, 4, Routing(num_experts=4, top_k=2)
    table = WeightTable(torch.float32, CPU)
    layers = LinearLayers(table, {"quantization_config": {"quant_method": "fp8", "weight_block_size": (8, 8)}})
    names = ("e.gate_up_proj", "e.down_proj")
    sizes = (experts, hidden, inner)
    weights = expert_weights.stacked_experts(layers, *names, *sizes, transposed=True, in_pairs=in_pairs, bias=True)
    numbers = []
    for name, shape in zip(names, ((hidden, 2 * inner), (inner, hidden)), strict=True):
        codes = torch.stack([codes_like(torch.empty(shape)) for _ in range(experts)])
        scale = torch.rand(experts, shape[0] // 8, shape[1] // 8) * 0.01
        table.put(name, codes)
        table.put(f"{name}_scale_inv", scale)
        table.put(f"{name}_bias", torch.zeros(experts, shape[1]))
        numbers.append((codes.float() * scale.repeat_interleave(8, 1).repeat_interleave(8, 2)).mT)
    table.check_complete()
    table.finish()
    assert isinstance(weights.gate_up, KeptExperts)
    if in_pairs:
        numbers[0] = torch.cat((numbers[0][:, ::2], numbers[0][:, 1::2]), 1)
    for method, want in zip((weights.gate_up, weights.down), numbers, strict=True):
        torch.testing.assert_close(method.linear(1).dequantized(), want[1])
    if kind == "grouped":
        from blockyard.services.gpu_worker.layers.moe.grouped_experts import GroupedExperts

        made: Any = GroupedExperts(weights, routing, Gate.SILU, False)
    else:
        made = routed_experts.HostExperts(weights, routing, Gate.SILU, False)
    x = torch.randn(5, hidden)
    chosen, factors = made.choose(torch.randn(5, experts), None)
    got = made.forward(x, chosen, factors, None)
    for row in range(5):
        want = torch.zeros(hidden)
        for expert, factor in zip(chosen[row].tolist(), factors[row], strict=True):
            gate, up = (numbers[0][expert] @ round_eights(x[row])).chunk(2)
            want += factor * (numbers[1][expert] @ round_eights(F.silu(gate) * up))
        torch.testing.assert_close(got[row], want, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("model", ["llama4", "gemma4-moe"])
def test_experts_that_are_stored_one_by_one_instead(tmp_path: Path, model: str) -> None:
    """llm-compressor makes linear layers of the experts that transformers stacks."""
    made, transposed = write_fp8(tmp_path, model, "row"), model == "llama4"
    plain, packed = (load_file(one / "model.safetensors") for one in (made.plain, made.packed))
    for name in [name for name in packed if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        stack, kinds = packed.pop(name), ("gate_proj", "up_proj") if "gate" in name else ("down_proj",)
        numbers = []
        for i, matrix in enumerate(stack.mT if transposed else stack):
            for kind, own in zip(kinds, matrix.chunk(len(kinds)), strict=True):
                stored = store("row", False, f"{name.rpartition('.')[0]}.{i}.{kind}", own)
                assert stored is not None
                packed |= stored[0]
                numbers.append(stored[1])
        stacked = torch.cat(numbers).view(stack.mT.shape if transposed else stack.shape)
        plain[name] = (stacked.mT if transposed else stacked).contiguous()
    for folder, tensors in ((made.plain, plain), (made.packed, packed)):
        save_file(tensors, folder / "model.safetensors")
    runner = check_logits(made, round_rows)
    assert {one.method.form for one in runner.model.linears()} == {"Fp8W8A8", "dense"}


def round_eights(x: Tensor) -> Tensor:
    return rounded(x.view(-1, 8), x.view(-1, 8).abs().amax(1, keepdim=True).clamp(min=1e-9) / 448).view(-1)


@pytest.mark.parametrize("suffix", ["weight_scale", "weight"])
@pytest.mark.parametrize("layer", ["layers.1.block_sparse_moe.experts.3.w3", "layers.2.self_attn.k_proj"])
def test_what_lacks_is_named(tmp_path: Path, layer: str, suffix: str) -> None:
    made = write_fp8(tmp_path, "mixtral", "tensor")
    check_lack(made, f"model.{layer}.{suffix}")


def test_a_scale_of_kv_b_proj_that_lacks_is_named(tmp_path: Path) -> None:
    made = write_fp8(tmp_path, "deepseek-v3", "tensor")
    check_lack(made, "model.layers.1.self_attn.kv_b_proj.weight_scale")


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        (
            {"q_proj.weight": torch.ones(64, 64)},
            r"layers.0.self_attn.q_proj.weight: the .* has float32, expected float8",
        ),
        (
            {"q_proj.weight_scale": torch.ones(3)},
            r"q_proj.weight_scale: the checkpoint has \[3\], config.json means \[\]",
        ),
        (
            {"q_proj.weight_scale": torch.tensor(torch.nan)},
            r"^model\.safetensors: \S+\.0\.self_attn\.q_proj\.weight_scale: .* scale of nan$",
        ),
        ({"q_proj.weight_scale": torch.tensor(-1.0)}, r"layers.0.self_attn.q_proj.weight_scale: .* scale of -1\.0"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changed: dict[str, Tensor], error: str) -> None:
    made = write_fp8(tmp_path, "llama", "tensor")
    file = made.packed / "model.safetensors"
    own = {f"model.layers.0.self_attn.{name}": value for name, value in changed.items()}
    save_file(load_file(file) | own, file)
    with pytest.raises(LoadError, match=error):
        start(made.packed)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"activation_scheme": "often"}, "activation_scheme 'often' is none of dynamic, static"),
        ({"weight_block_size": [128]}, "Expected `array` of length 2"),
        ({"weight_block_size": [0, 128]}, r"weight_block_size \[0, 128\]: sizes are 1 or more"),
        ({"ignored_layers": "lm_head"}, 'ignored_layers is "lm_head": Expected `array`'),
        ({"activation_scale_ub": 0.0}, "activation_scale_ub 0.0: a bound of scales is more than 0"),
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        fp8.Fp8Scheme({"quant_method": "fp8", **fields}, CPU)


def test_dtypes_are_checked_before_memory_is_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = write_fp8(tmp_path, "llama", "row")
    monkeypatch.setattr(engine.checkpoint, "load", lambda *given: pytest.fail("memory is allocated"))
    with pytest.raises(LoadError, match=r"_proj\.weight: the checkpoint has float8_e4m3fn, expected bfloat16, float16"):
        start(made.packed, config_overrides='{"quantization_config": {"modules_to_not_convert": ["self_attn"]}}')


def test_dummy_weights_with_static_scales_of_inputs(tmp_path: Path) -> None:
    check_dummy_weights(write_fp8(tmp_path, "llama", "tensor", static=True).packed)


def test_rounding_does_not_depend_on_other_rows() -> None:
    x = torch.randn(7, 50)
    x[3] *= 1e6
    x[5] = 0
    for group in (None, 16):
        codes, scales = eight_bits.to_e4m3(x, group)
        for row in range(7):
            alone, own = eight_bits.to_e4m3(x[row : row + 1], group)
            assert torch.equal(alone.view(torch.uint8)[0], codes.view(torch.uint8)[row])
            assert torch.equal(own[0], scales[row])
        assert torch.isfinite(codes.float()).all()
        error = (codes.float() * eight_bits.expand(scales, group, 50) - x).abs() / x.abs().amax(1, keepdim=True).clamp(
            1
        )
        assert float(error.max()) < 1 / 16

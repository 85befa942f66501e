"""Sources of the scales of an 8-bit KV cache, and scales that are refused."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tiny_models import BY_NAME, model_shape, settings

from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.attention.cpu_metadata import CpuMetadataBuilder
from blockyard.services.gpu_worker.attention.metadata import AttentionMetadata
from blockyard.services.gpu_worker.attention.triton_attention import build_attention
from blockyard.services.gpu_worker.kv import scales as kv_scales
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.kv.pool_blocks import RankBlocks
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.kv_transfer.layout import as_text
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import ConfigError, LoadError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = model_shape(
    num_heads=4,
    kv_heads=2,
    head_dim=16,
    scale=0.25,
    windows=(None, None),
)


def pool(dtype: torch.dtype = torch.float8_e4m3fn) -> KVPool:
    return KVPool(SHAPE, 20, 8, dtype, DEVICE)


def config(folder: Path, **changed: object) -> WorkerConfig:
    return msgspec.structs.replace(settings(folder), kv_cache_dtype="fp8", **changed)


@pytest.mark.parametrize(
    "name", ["self_attn.k_scale", "self_attn.k_proj.k_scale", "self_attn.k_proj.output_scale", "self_attn.kv_scale"]
)
def test_scales_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    table = WeightTable(torch.float32, DEVICE)
    scales = kv_scales.place_scales(table, 2, is_wanted=True)
    assert table.wants(f"model.layers.1.{name}")
    table.put(f"model.layers.1.{name}", torch.tensor([0.5]))
    table.check_complete()  # a checkpoint need not have them
    assert scales.tolist() == [[1.0, 1.0], [0.5, 0.5 if "kv_scale" in name else 1.0]]
    it = pool()
    assert kv_scales.set_pool_scales(it, scales, config(tmp_path)) == ["KV scales: float8_e4m3fn, the checkpoint"]
    assert it.scales is not None
    assert torch.equal(it.scales, scales)
    with pytest.raises(LoadError, match="one number"):
        table.put(f"model.layers.1.{name}", torch.ones(2))
    table.put(f"model.layers.1.{name}", torch.tensor(0.0))
    with pytest.raises(LoadError, match="layer 1 has"):
        kv_scales.set_pool_scales(it, scales, config(tmp_path))


def test_scales_of_queries_and_probabilities_are_ignored() -> None:
    table = WeightTable(torch.float32, DEVICE)
    kv_scales.place_scales(table, 2, is_wanted=True)
    for name in ("self_attn.q_scale", "self_attn.q_proj.output_scale", "self_attn.attn.prob_scale"):
        assert not table.wants(f"model.layers.1.{name}")


def test_a_16_bit_cache_ignores_scales(tmp_path: Path) -> None:
    table = WeightTable(torch.float32, DEVICE)
    scales = kv_scales.place_scales(table, 2, is_wanted=False)
    assert not table.wants("model.layers.1.self_attn.k_scale")
    assert kv_scales.set_pool_scales(pool(torch.float16), scales, settings(tmp_path)) == []


def test_scales_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "scales.json"
    file.write_text('{"model_type": "llama", "kv_cache": {"scaling_factor": {"0": {"0": 0.25, "1": 2.0}}}}')
    it = pool()
    notes = kv_scales.set_pool_scales(it, torch.ones(2, 2, device=DEVICE), config(tmp_path, kv_scales_path=str(file)))
    assert notes == [f"KV scales: float8_e4m3fn, {file}"]
    assert it.scales is not None
    assert it.scales.tolist() == [[0.25, 0.25], [2.0, 2.0]]
    for text, message in (("[]", "not a file of KV scales"), ('{"kv_cache": {"scaling_factor": {}}}', "of 0 layers")):
        file.write_text(text)
        with pytest.raises(LoadError, match=message):
            kv_scales.set_pool_scales(it, torch.ones(2, 2), config(tmp_path, kv_scales_path=str(file)))


def test_scales_of_the_first_prompt(tmp_path: Path) -> None:
    """Scales follow from its largest K and V, after norm and rotation; later prompts do not change them."""
    it = pool()
    kv_scales.set_pool_scales(it, torch.ones(2, 2), config(tmp_path, calculate_kv_scales=True))
    assert it.scales_pending
    torch.manual_seed(0)
    tables = torch.arange(4, dtype=torch.int32, device=DEVICE)[None]
    slots, starts = torch.zeros(3, dtype=torch.int64, device=DEVICE), torch.tensor([0, 3]).int().to(DEVICE)
    rows = PagedKVMetadata(slots, torch.arange(3, device=DEVICE), tables)
    attend = build_attention(it, AttentionMetadata(rows, starts))
    it.layers[0][9] = torch.full((2, 2, 8, 16), 2.0, device=DEVICE).to(it.dtype)  # of a prompt of one token
    angles = torch.randn(3, 1, 8)
    rotation = torch.polar(torch.ones_like(angles), angles).to(DEVICE)
    norm = RMSNorm(torch.randn(6, 16, device=DEVICE), 1e-6)
    qkv = torch.randn(3, 8, 16, device=DEVICE)
    with it.trial_steps():
        attend(0, 100 * qkv, rotation, norm)
    assert it.scales is not None
    assert it.scales.unique().tolist() == [1.0]
    for layer in range(2):
        assert it.scales_pending
        attend(layer, (layer + 1) * qkv, rotation, norm)
    assert not it.scales_pending
    assert it.scales is not None
    (k_first, v_first), (k_second, v_second) = it.scales.tolist()
    assert k_first == pytest.approx(k_second)  # normalised
    assert v_second == pytest.approx(2 * v_first)
    assert v_first == pytest.approx(float(qkv[:, 6:].abs().max()) / 100)
    earlier = it.layers[0][9].float() * it.scales[0][:, None, None, None]
    torch.testing.assert_close(earlier, torch.full_like(earlier, 2.0), rtol=0.07, atol=0)
    stored = it.runs[0][0].float()[tables[0, 0].long(), 0, :, :3] * k_first
    x = norm(qkv[:, :6])[:, 4:]
    assert float(stored.norm()) == pytest.approx(float(x.norm()), rel=0.05)
    attend(0, 9 * qkv, rotation, norm)
    assert it.scales.tolist() == [[k_first, v_first], [k_second, v_second]]


def test_ranks_with_different_heads_have_the_largest_scales(tmp_path: Path) -> None:
    it, asked = pool(), list[list[float]]()

    def largest(scales: torch.Tensor) -> torch.Tensor:
        asked.append(scales.tolist())
        return torch.maximum(scales, torch.tensor([0.05, 0.001], device=DEVICE))

    kv_scales.set_pool_scales(it, torch.ones(2, 2), config(tmp_path, calculate_kv_scales=True), of_heads=largest)
    heads = torch.full((3, 2, 16), 2.0, device=DEVICE)
    it.measure_scales(0, heads, heads)
    it.measure_row_scale(1, heads)
    assert it.scales is not None and not it.scales_pending
    assert asked == [pytest.approx([0.01, 0.02]), pytest.approx([0.01, 0.01])]
    assert it.scales.tolist() == [pytest.approx([0.05, 0.02]), pytest.approx([0.05, 0.01])]


def test_scrub_clears_8_bit_blocks_that_are_not_finite() -> None:
    it = pool()
    it.runs[0][1, 3] = torch.full((2, 2, 8, 16), float("nan"), device=DEVICE).to(it.dtype)
    it.runs[0][1, 4] = torch.full((2, 2, 8, 16), 2.0, device=DEVICE).to(it.dtype)
    CpuMetadataBuilder(it)  # every worker creates one, even if it is unused
    it.scrub(np.array([3, 4]))
    assert torch.equal(it.runs[0][1, 3:5].float().amax((1, 2, 3, 4)).cpu(), torch.tensor([0.0, 2.0]))


def test_kv_cache_dtype_is_checked(tmp_path: Path) -> None:
    BY_NAME["llama"].save(tmp_path)
    with pytest.raises(ConfigError, match="need a GPU; on CPU leave it at auto"):
        engine.start(msgspec.structs.replace(settings(tmp_path), kv_cache_dtype="fp8"), lambda *_: None)
    with pytest.raises(ConfigError, match="float32"):
        kv_scales.pick_kv_dtype("fp8", torch.float32, has_8_bit_kv=True)
    assert kv_scales.pick_kv_dtype("fp8_e5m2", torch.bfloat16, has_8_bit_kv=True) == torch.float8_e5m2
    assert kv_scales.pick_kv_dtype("auto", torch.bfloat16, has_8_bit_kv=False) == torch.bfloat16


def test_stages_know_the_scales_of_all_layers(tmp_path: Path) -> None:
    """Other workers compare them, whose stages may have other layers."""
    own, given = [torch.tensor([[0.5, 0.25]]), torch.tensor([[2.0, 3.0]])], list[torch.Tensor]()
    stages = [KVPool(SHAPE.of_layers(range(i, i + 1)), 20, 8, torch.float8_e4m3fn, DEVICE) for i in range(2)]

    def largest(values: torch.Tensor) -> torch.Tensor:
        given.append(values)
        return torch.stack(given).amax(0)

    for _ in range(2):  # the first one has both the second time
        for it, scales in zip(stages, own, strict=True):
            kv_scales.set_pool_scales(it, scales, config(tmp_path), largest)
    whole = pool()
    whole.set_scales(torch.cat(own))
    layouts = [RankBlocks(it).layout for it in (whole, *stages)]
    assert len({as_text(one) for one in layouts if one is not None}) == 1
    assert [one.part.layers if one is not None and one.part else None for one in layouts] == [
        None,
        range(1),
        range(1, 2),
    ]
    assert [it.scales.tolist() for it in stages if it.scales is not None] == [one.tolist() for one in own]

"""Attention of latent layers in mixed steps through the Triton kernels, against decompressed K and V in float64."""

from dataclasses import replace

import pytest
import torch
from adapter_tables import make_table
from torch import Tensor

from blockyard.kernels.attention.latent import prefill_in_pieces as pieces_file
from blockyard.kernels.attention.latent.prefill_in_pieces import prefill_in_pieces_reference
from blockyard.kernels.attention.latent.write_latent import write_latent_reference
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.lora.adapter_table import add_adapters_reference
from blockyard.kernels.lora.adapter_tokens import adapt_embeddings_reference, replace_logits_reference
from blockyard.kernels.lora.add_adapters import start_adapters
from blockyard.kernels.lora.add_to_heads import add_to_heads
from blockyard.services.gpu_worker.attention.metadata import AttentionMetadata
from blockyard.services.gpu_worker.attention.triton_attention import build_attention
from blockyard.services.gpu_worker.execution.cuda.prefill_kernels import compile_prefills
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.layers.adapter_rows import AdapterRows
from blockyard.services.gpu_worker.layers.attention import AttentionShape
from blockyard.services.gpu_worker.lora.device.device_products import AdapterKernels, DeviceAdaptedHeads
from blockyard.services.gpu_worker.models.interface import ModelShape
from blockyard.services.gpu_worker.step import LatentRows, LogitsIndices

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, PLAIN, ROTATED, VALUE, LATENT, SIZE, BLOCKS = 4, 6, 4, 10, 16, 4, 90
LAYER = AttentionShape(
    num_heads=HEADS,
    kv_heads=1,
    head_dim=LATENT + ROTATED,
    rules=ScoreRules(scale=0.3),
    latent_dim=LATENT,
    plain_dim=PLAIN,
    value_dim=VALUE,
)
SHAPE = ModelShape(vocab_size=9, max_positions=64, attention=(LAYER, replace(LAYER, rules=ScoreRules(scale=0.2))))


class Case:
    """`num_decodes` decodes and a prefill for each of `counts`, with earlier tokens in the cache."""

    def __init__(self, num_decodes: int, counts: tuple[int, ...], befores: list[int]) -> None:
        sizes = torch.tensor([1] * num_decodes + list(counts), dtype=torch.int64)
        first = sizes.cumsum(0) - sizes
        slots = torch.randperm(len(sizes) + 1)[: len(sizes)]
        slots[-1] = -1  # the last sequence no longer has a slot
        positions = torch.arange(int(sizes.sum())) + (torch.tensor(befores) - first).repeat_interleave(sizes)
        tables = torch.randperm(BLOCKS)[: (len(sizes) + 1) * 10].view(-1, 10).int().to(DEVICE)
        self.num_decodes = num_decodes
        self.rows = PagedKVMetadata(slots.repeat_interleave(sizes).to(DEVICE), positions.to(DEVICE), tables)
        self.starts = torch.cat((first, sizes.sum()[None])).int().to(DEVICE)
        angles = torch.randn(len(positions), 1, ROTATED // 2)
        self.rotation = torch.polar(torch.ones_like(angles), angles).to(DEVICE)
        self.query = torch.randn(len(positions), HEADS, PLAIN + ROTATED, device=DEVICE)
        self.latent = LatentRows(
            torch.randn(len(positions), LATENT + ROTATED, device=DEVICE),
            RMSNorm(torch.randn(LATENT, device=DEVICE), 1e-6),
            torch.randn(HEADS, PLAIN + VALUE, LATENT, device=DEVICE) * LATENT**-0.5,
            PLAIN,
        )

    def inputs(self) -> tuple[Tensor, LatentRows]:
        """Copies: a call writes to them."""
        return self.query.clone(), replace(self.latent, rows=self.latent.rows.clone())

    def want(self, layer: Tensor, rules: ScoreRules) -> Tensor:
        """Writes to the layer."""
        query, latent = self.inputs()
        cached = layer.clone()
        write_latent_reference(query, latent.rows, layer, self.rows, self.rotation, latent.norm.weight, latent.norm.eps)
        tensors = (x.double() for x in (query, latent.rows, cached))
        return prefill_in_pieces_reference(*tensors, self.rows, self.starts, rules, latent.up.double())


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("num_decodes", "counts"), [(0, (5, 3)), (2, (9, 2, 3)), (3, ())])
def test_decodes_and_prefills_in_one_step(
    num_decodes: int, counts: tuple[int, ...], invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces_file, "_PIECE_BYTES", 1)
    torch.manual_seed(num_decodes + len(counts))
    befores = [(i * 11) % 25 for i in range(num_decodes + len(counts))]
    case = Case(num_decodes, counts, befores)
    pool = KVPool(SHAPE, BLOCKS, SIZE, torch.float32, DEVICE, invariant)
    pool.runs[0].normal_()
    want_memory = pool.runs[0].clone()
    attend = build_attention(
        pool,
        AttentionMetadata(
            case.rows, case.starts[num_decodes:] if counts else None, num_decodes, max_context_len=max(befores)
        ),
    )
    for layer, shape in enumerate(SHAPE.attention):
        query, latent = case.inputs()
        want = case.want(want_memory[layer], shape.rules)
        assert_close(attend.latent(layer, query, case.rotation, latent), want)
        assert_close(pool.runs[0][layer], want_memory[layer])


@pytest.mark.parametrize("invariant", [False, True])
def test_only_rows_that_need_logits_are_computed(invariant: bool) -> None:
    torch.manual_seed(4)
    case = Case(1, (6, 4, 3), [9, 0, 7, 0])
    pool = KVPool(SHAPE, BLOCKS, SIZE, torch.float32, DEVICE, invariant)
    pool.runs[0].normal_()
    last = case.starts[1:].long() - 1
    indices = LogitsIndices(last, case.rows.slots[last], case.rows.positions[last])
    metadata = AttentionMetadata(case.rows, case.starts[1:], 1, max_context_len=9)
    attend = build_attention(pool, metadata)
    for layer, (shape, backend) in enumerate(zip(SHAPE.attention, (attend, attend.of_rows(indices)), strict=True)):
        query, latent = case.inputs()
        want = case.want(pool.runs[0][layer].clone(), shape.rules)
        assert_close(backend.latent(layer, query, case.rotation, latent), want[last] if layer else want)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_rows_in_8_bits_with_a_measured_scale(dtype: torch.dtype) -> None:
    """Prefills read their new rows before they are rounded; a decode then reads them in 8 bits."""
    torch.manual_seed(5)
    case = Case(0, (12, 3), [0, 0])
    pool = KVPool(SHAPE, BLOCKS, SIZE, dtype, DEVICE)
    pool.measure_next_prefill(None)
    attend, wanted = build_attention(pool, AttentionMetadata(case.rows, case.starts, 0)), []
    for layer, shape in enumerate(SHAPE.attention):
        query, latent = case.inputs()
        wanted.append(case.want(torch.zeros(BLOCKS, 1, 1, SIZE, LATENT + ROTATED, device=DEVICE), shape.rules))
        assert_close(attend.latent(layer, query, case.rotation, latent), wanted[-1])
    assert pool.scales is not None and not pool.scales_pending
    assert torch.equal(pool.scales[:, 0], pool.scales[:, 1]) and (pool.scales < 1).all()
    rows = PagedKVMetadata(case.rows.slots[11:12], case.rows.positions[11:12], case.rows.tables)
    query, latent = case.inputs()
    decode = build_attention(pool, AttentionMetadata(rows))
    got = decode.latent(0, query[11:12], case.rotation[11:12], replace(latent, rows=latent.rows[11:12]))
    assert float((got - wanted[0][11:12]).norm() / wanted[0][11:12].norm()) < 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2])
def test_kernels_of_prefills_are_compiled_ahead(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    compile_prefills(KVPool(SHAPE, 1, SIZE, dtype, DEVICE), torch.float32)
    assert not caplog.records


@pytest.mark.parametrize("invariant", [False, True])
def test_sequences_with_adapters_of_the_up_projection(invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one step: as each sequence with the product of its adapter's matrices in the weight."""
    monkeypatch.setattr(pieces_file, "_PIECE_BYTES", 1)
    torch.manual_seed(8)
    case, befores, places = Case(2, (9, 4, 3), [9, 14, 20, 0, 7]), [9, 14, 20, 0, 7], [0, -1, 1, 0, -1]
    table = make_table([[3], [17]], [HEADS * (PLAIN + VALUE)], LATENT, torch.float32)
    of_rows = torch.tensor(places, dtype=torch.int32).repeat_interleave(case.starts.diff().cpu()).to(DEVICE)
    rows = AdapterRows()
    rows.begin(of_rows)
    kernels = AdapterKernels(start_adapters, add_to_heads, adapt_embeddings_reference, replace_logits_reference)
    adapted = DeviceAdaptedHeads(rows, table, kernels, PLAIN)
    pool = KVPool(SHAPE, BLOCKS, SIZE, torch.float32, DEVICE, invariant)
    pool.runs[0].normal_()
    before, up = pool.runs[0][0].clone(), case.latent.up
    attend = build_attention(pool, AttentionMetadata(case.rows, case.starts[2:], 2, max_context_len=max(befores)))
    query, latent = case.inputs()
    got = attend.latent(0, query, case.rotation, replace(latent, adapted=adapted))
    for place in (-1, 0, 1):
        both = torch.zeros(LATENT, HEADS * (PLAIN + VALUE), device=DEVICE)
        chosen = torch.full((LATENT,), place, dtype=torch.int32, device=DEVICE)
        add_adapters_reference(torch.eye(LATENT, device=DEVICE), chosen, table, both)
        case.latent = replace(case.latent, up=up + both.T.view(up.shape))
        want = case.want(before.clone(), SHAPE.attention[0].rules)
        assert_close(got[of_rows == place], want[of_rows == place])

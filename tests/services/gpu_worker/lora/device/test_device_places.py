"""Adapters in the memory of a device, in the steps of a GPU with its operations in plain torch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import reference_experts
import torch
from device_adapters import start_on
from peft_adapters import Batch, load_adapters, save_adapter
from placed_adapters import EXACT, KERNELS, finished, read_adapter
from reference_ops import ReferenceOps, run_ahead
from slot_plans import greedy, prompt_of
from tiny_models import BY_NAME, settings, start

from blockyard.kernels.lora.adapter_table import AdapterTiles
from blockyard.kernels.lora.adapter_tiles import tile_rows
from blockyard.kernels.lora.adapter_tokens import adapt_embeddings_reference, replace_logits_reference
from blockyard.kernels.lora.add_to_heads import add_to_heads_reference
from blockyard.services.gpu_worker.compilation import record_kernels
from blockyard.services.gpu_worker.execution.cuda.decode_graphs import DecodeSize
from blockyard.services.gpu_worker.host_link import SameMemory
from blockyard.services.gpu_worker.layers.linear import dense_linear
from blockyard.services.gpu_worker.lora.device import packed_adapter, place_sizes
from blockyard.services.gpu_worker.lora.device.adapter_pages import aligned
from blockyard.services.gpu_worker.lora.device.device_places import DevicePlaces
from blockyard.services.gpu_worker.lora.device.device_products import AdapterKernels
from blockyard.services.gpu_worker.lora.device.packed_adapter import AdapterPacker, addresses
from blockyard.services.gpu_worker.lora.device.place_sizes import TokenSizes, largest_counts, place_layout
from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits
from blockyard.services.gpu_worker.lora.targets import ModelTargets, layer_shares
from blockyard.services.gpu_worker.memory import KVMemoryNeed
from blockyard.services.gpu_worker.quantization.method import Fusion
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.config.services.lora import LoraConfig
from blockyard.shared.errors import AdapterError
from blockyard.shared.messages import AdapterPlaced

LORA = LoraConfig(max_loras=2, max_cpu_loras=3, max_rank=16)
LIMITS = AdapterLimits(dtype=torch.float32, max_rank=16)
BOTH = [AdapterPlaced(0, 1), AdapterPlaced(1, 2)]


TARGETS = {
    "llama": (["q_proj", "v_proj", "down_proj"], ["up_proj", "k_proj", "lm_head"]),
    "deepseek-v3": (["kv_b_proj", "q_b_proj"], ["kv_b_proj"]),
}


@pytest.fixture(scope="module", params=["llama"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    tiny, base = BY_NAME[request.param], tmp_path_factory.mktemp("base")
    found = [base]
    for seed, targets in enumerate(TARGETS[request.param], 1):
        folder = tmp_path_factory.mktemp("adapter")
        save_adapter(tiny.save(base), folder, seed, target_modules=targets, r=3 + 4 * seed)
        found.append(folder)
    return found


def on_device(folders: list[Path]) -> Runner:
    """A runner with the steps of a GPU, and its adapters in places of a device."""
    runner = start_on("reference", folders[0], LORA)
    runner.reset(8)
    load_adapters(runner, folders[1:])
    return runner


@pytest.mark.parametrize("folders", list(TARGETS), indirect=True)
@pytest.mark.parametrize("places", [[0, None, 1, 0], [1, 1], [None, None]])
def test_as_on_the_cpu(places: list[int | None], folders: list[Path]) -> None:
    runner, device = start(folders[0], lora=LORA), on_device(folders)
    runner.reset(8)
    load_adapters(runner, folders[1:])
    found = Batch(device, places, BOTH).run(6)
    for got, want in zip(found, Batch(runner, places, BOTH).run(6), strict=True):
        assert [ids for ids, _ in got] == [ids for ids, _ in want]
        assert [p for _, p in got] == pytest.approx([p for _, p in want], abs=1e-4)


def test_a_step_without_adapters_is_as_without_the_flag(folders: list[Path]) -> None:
    device, plain = on_device(folders), start(folders[0])
    run_ahead(plain, 16)
    plain.reset(8)
    want = Batch(plain, [None, None], []).run(4)
    Batch(device, [0, 1], BOTH).run(3)
    device.reset(8)
    assert Batch(device, [None, None], []).run(4) == want


def test_prompt_logprobs(folders: list[Path]) -> None:
    found = []
    for runner in (start(folders[0], lora=LORA), on_device(folders)):
        if runner.adapters is not None and not found:
            runner.reset(8)
            load_adapters(runner, folders[1:])
        [result] = Batch(runner, [1], BOTH, greedy(num_prompt_logprobs=0), [prompt_of(11)]).first()
        found.append([one.logprob for one in result.prompt_logprobs])
    assert len(found[0]) == 10 and found[0] == pytest.approx(found[1], abs=1e-4)


def test_a_place_holds_the_largest_adapter_and_an_adapter_its_own_bytes(folders: list[Path]) -> None:
    runner = start(folders[0])
    linears, shares = runner.model.linears(), layer_shares(runner.model)
    places = DevicePlaces(runner.model, 2, LIMITS, KERNELS, torch.device("cpu"), SameMemory())
    adapter = read_adapter(folders[1], ModelTargets(runner.model), EXACT)
    own_bytes, num_layers = adapter.size_bytes, len(adapter.deltas)
    pieces = places.prepare(adapter)
    assert all(next(pieces) for _ in range(2 * num_layers)) and not adapter.deltas, "counted and packed layer by layer"
    held = finished(pieces)
    assert own_bytes <= held.size_bytes < own_bytes * 1.05, "nothing is padded to the largest rank"
    counts = [*largest_counts(linears, shares, LIMITS), *TokenSizes(runner.model, LIMITS).counts(LIMITS)]
    assert places.size_bytes == 2 * 4 * sum(map(aligned, counts))
    small = AdapterLimits(dtype=torch.float32, max_rank=16, target_modules=("q_proj",))
    assert sum(largest_counts(linears, shares, small)) == 3 * 16 * (64 + 64) + (3 * 64 if small.with_bias else 0)


def test_a_place_gets_another_adapter_and_the_first_again(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_sizes, "PAGE_BYTES", 1)
    device = on_device(folders)

    def run(number: int) -> list[list[tuple[list[int], float]]]:
        device.reset(8)
        return Batch(device, [0], [AdapterPlaced(0, number)]).run(3)

    first, second, again = (run(number) for number in (1, 2, 1))
    assert first == again != second


class RecordedLink(SameMemory):
    """A link whose streams write down what they are asked to do."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.sizes = log, list[int]()

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        made = super().host_tensor(shape, dtype)
        self.sizes.append(made.nbytes)
        return made

    def stream(self) -> "RecordedLink":
        return self

    @contextmanager
    def use(self) -> Iterator[None]:
        self.log.append("copy")
        yield
        self.log.append("copied")

    def event(self) -> "RecordedLink":
        return self

    def record(self) -> None:
        self.log.append("record")

    def hold_steps(self) -> None:
        self.log.append("hold")


def test_an_adapter_is_packed_in_chunks_and_copied_beside_the_steps(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix may lie in two chunks, and an adapter in several pages, which need not follow each other."""
    monkeypatch.setattr(packed_adapter, "CHUNK_BYTES", 4 * 1000)
    monkeypatch.setattr(place_sizes, "PAGE_BYTES", 1)
    runner, link = start(folders[0]), RecordedLink([])
    model, limits = runner.model, replace(LIMITS, target_modules=("q_proj", "v_proj", "down_proj"))
    places = DevicePlaces(model, 2, limits, KERNELS, torch.device("cpu"), link)  # type: ignore[arg-type]
    adapter = read_adapter(folders[1], ModelTargets(model), EXACT)
    given = dict(adapter.deltas)
    held = finished(places.prepare(adapter))
    assert held.packed is not None and held.packed.num_pages > 2
    assert max(link.sizes) <= max(4000, held.packed.offsets.nbytes) and not held.deltas
    assert link.sizes.count(4000) == held.size_bytes // 4000, "host memory is pinned in sizes that waste none"
    places.put(1, held)
    assert link.log == ["copy", "copied", "record", "hold"]
    memory, entry, numbers = places._memory, 0, 0
    for layer, share in enumerate(places._shares):
        for delta in given.get(layer, ()):
            at = entry + share.starts.index(delta.start)
            for i, matrix in enumerate((delta.a, delta.b)):
                assert matrix is not None
                begin, numbers = int(places._offsets[1, at, i]), numbers + int(matrix.count_nonzero())
                assert torch.equal(memory[begin : begin + matrix.numel()], matrix.flatten())
            assert int(places._ranks[1, at]) == delta.rank
        entry += len(share.sizes) if places._has_place[layer] else 0
    assert memory.count_nonzero() == numbers and not places._ranks[0].any(), "nothing else is written"


def test_an_adapter_that_lost_its_place_comes_back_without_a_copy(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_sizes, "PAGE_BYTES", 1)
    monkeypatch.setattr(place_sizes, "QUARTERS", (4,))
    model = start(folders[0]).model
    places = DevicePlaces(model, 1, LIMITS, KERNELS, torch.device("cpu"), SameMemory())
    first, second = (
        finished(places.prepare(read_adapter(folder, ModelTargets(model), EXACT))) for folder in folders[1:]
    )
    places.put(0, first)
    offsets, ranks, memory = places._offsets.clone(), places._ranks.clone(), places._memory.clone()
    places.put(0, second)
    assert not torch.equal(places._ranks, ranks)
    assert first.packed is not None
    places.put(0, replace(first, packed=replace(first.packed, chunks=[])))
    assert torch.equal(places._offsets, offsets) and torch.equal(places._ranks, ranks)
    written = memory != 0
    assert torch.equal(places._memory[written], memory[written])


def test_a_matrix_without_elements_may_lie_behind_the_last_page() -> None:
    """For example the rows of the head of a rank that has none of the adapter's tokens."""
    packer = AdapterPacker(SameMemory(), torch.float32, 32)
    places = torch.tensor([packer.add(torch.ones(count)) for count in (32, 0, 32, 0)])
    assert packer.layout.num_pages == 2
    assert addresses(places, [5, 3], 32).tolist() == [160, 96, 96, 96]
    assert [(chunk.first, len(chunk.values)) for chunk in packer.copy()] == [(0, 32), (32, 32)]


@pytest.mark.parametrize("rank", [8, 16, 32, 64, 128])
@pytest.mark.parametrize(("hidden", "kv", "inner"), [(4096, 1024, 14336), (8192, 128, 3584), (5120, 1024, 25600)])
def test_pages_waste_little(hidden: int, kv: int, inner: int, rank: int) -> None:
    """Of Llama 8B, a rank of eight of 70B, and Qwen3 32B."""
    shapes = [(hidden, hidden), (hidden, kv), (hidden, kv), (hidden, inner), (hidden, inner), (inner, hidden)]
    counts = [rank * width for _ in range(32) for shape in shapes for width in shape]
    layout = place_layout(counts, 2)
    assert layout.size <= 1.1 * sum(counts)


def test_what_has_no_room_in_a_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference_experts.use(monkeypatch)
    fields = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"], "r": 3}
    save_adapter(BY_NAME["qwen3-moe"].save(tmp_path / "base"), tmp_path / "adapter", **fields)
    model = start(tmp_path / "base").model
    adapter = read_adapter(tmp_path / "adapter", ModelTargets(model), EXACT)
    small = replace(LIMITS, target_modules=("q_proj",))
    without = DevicePlaces(model, 1, small, KERNELS, torch.device("cpu"), SameMemory())
    for limits, cause in (
        (replace(LIMITS, with_experts=False), r"experts.0.down_proj, for which places on the device have no room"),
        (
            replace(LIMITS, max_rank=1, target_modules=("q_proj", "down_proj")),
            r"takes \d+\.\d MiB on the device, a place has 0\.\d MiB",
        ),
        (replace(LIMITS, target_modules=("q_proj", "experts")), ""),
    ):
        places = DevicePlaces(model, 1, limits, KERNELS, torch.device("cpu"), SameMemory())
        if cause:
            with pytest.raises(AdapterError, match=cause):
                finished(places.prepare(adapter))
        else:
            places.put(0, finished(places.prepare(adapter)))
    assert without.size_bytes < places.size_bytes, "experts take room only where they may be changed"


@pytest.mark.parametrize("lora", [None, LORA], ids=["without", "with"])
def test_kernels_of_steps_with_adapters_are_recorded(
    lora: LoraConfig | None, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start, so that the first request with an adapter waits for no compiler."""
    runner, seen, tiled = start(folders[0], lora=lora), list[int](), list[int]()
    monkeypatch.setattr(record_kernels, "make_device_ops", lambda pool, fused_steps: ReferenceOps())

    def begin(x: torch.Tensor, *arguments: object, **others: object) -> Callable[[torch.Tensor], None]:
        seen.append(len(x))
        return lambda out: None

    def tile(places: torch.Tensor, num_places: int, *, batch_invariant: bool = False) -> AdapterTiles:
        tiled.append(len(places))
        return tile_rows(places, num_places, batch_invariant=batch_invariant)

    if lora is not None:
        with torch.inference_mode():
            others = (add_to_heads_reference, adapt_embeddings_reference, replace_logits_reference)
            kernels = AdapterKernels(begin, *others, tile)  # type: ignore[arg-type]
            DevicePlaces(runner.model, 2, LIMITS, kernels, torch.device("cpu"), SameMemory())
    config = settings(folders[0], lora=lora, max_num_seqs=4, max_num_batched_tokens=16)
    need = KVMemoryNeed(
        block_size=8, block_bytes=1024, max_model_len=64, max_num_seqs=4, max_step_tokens=16, batch_invariant=True
    )
    with torch.inference_mode():
        record_kernels._launch_steps(runner.model, need, torch.float32, 1, config)
    assert set(seen) == ({1, 4, 5, 16} if lora is not None else set())
    assert set(tiled) == (set(range(1, 17)) if lora is not None else set())


def test_products_are_recorded_fused_and_alone() -> None:
    """Of as many rows as may be fused: of tiles of one row, and of more."""
    linears = [dense_linear(torch.ones(3, 2), fusion=Fusion.NORM), dense_linear(torch.ones(3, 2))]
    for linear in linears:
        linear.use({}, fused={2: Mock()})
    seen, model, steps = list[tuple[int, list[bool]]](), Mock(linears=lambda: linears), Mock()
    steps.sizes = [DecodeSize(rows, False, is_adapted=True) for rows in (16, 8, 2, 1)] + [DecodeSize(4, False)]
    steps.forward = lambda size: seen.append((size.rows, [linear.fused(size.rows) is not None for linear in linears]))
    record_kernels._launch_fused(model, steps)
    assert seen == [(8, [True, False]), (1, [True, False]), (8, [False, False]), (1, [False, False])]
    assert linears[0].fused(2) is not None and linears[0].fused(8) is None, "the kernels before are there again"


def test_products_are_recorded_behind_ordered_ones() -> None:
    """Once, of rows in tiles: of fewer, the first product is never launched behind the layer's own."""
    seen, linear = list[int](), dense_linear(torch.ones(3, 2), fusion=Fusion.NORM)
    steps, adapted = Mock(), Mock(is_active=True)
    linear.use({}, fused={16: Mock()})
    linear.adapt(adapted)
    steps.sizes = [DecodeSize(rows, False, is_adapted=True) for rows in (1, 16, 32)] + [DecodeSize(8, False)]
    steps.forward = lambda size: linear.fused(size.rows) or linear(torch.ones(size.rows, 2))
    adapted.start = lambda x, *, is_ordered: lambda out: seen.append(len(out)) if is_ordered else None
    record_kernels._launch_ordered(Mock(linears=lambda: [linear]), steps, batch_invariant=False)
    assert seen == [16] and linear.fused(16) is not None, "the kernels before are there again"

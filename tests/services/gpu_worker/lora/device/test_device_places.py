"""Adapters in the memory of a device, in the steps of a GPU with its operations in plain torch."""

from pathlib import Path

import pytest
import torch
from device_adapters import KERNELS, start_on
from peft_adapters import Batch, load_adapters, save_adapter
from placed_adapters import EXACT, finished, read_adapter
from reference_ops import run_ahead
from slot_plans import greedy, prompt_of
from tiny_models import BY_NAME, start

from blockyard.services.gpu_worker.host_link import SameMemory
from blockyard.services.gpu_worker.lora.device.device_places import DevicePlaces, TokenSizes, place_size
from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits
from blockyard.services.gpu_worker.lora.targets import ModelTargets, layer_shares
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.config.services.lora import LoraConfig
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
    held = finished(places.prepare(adapter))
    assert adapter.size_bytes <= held.size_bytes < adapter.size_bytes * 1.05, "nothing is padded to the largest rank"
    of_tokens = TokenSizes(runner.model, LIMITS).place_size(LIMITS)
    assert places.size_bytes == 2 * 4 * (place_size(linears, shares, LIMITS) + of_tokens)
    small = AdapterLimits(dtype=torch.float32, max_rank=16, target_modules=("q_proj",))
    assert place_size(linears, shares, small) == 3 * 16 * (64 + 64) + (3 * 64 if small.with_bias else 0)

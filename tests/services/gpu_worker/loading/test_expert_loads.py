"""Samples of how often experts are chosen, alone and of a worker's steps."""

import json
from pathlib import Path

import pytest
import torch
from plan_driver import Driver
from tiny_models import start

from blockyard.services.gpu_worker.host_link import SameMemory
from blockyard.services.gpu_worker.loading.expert_loads import MOST_LAYERS, ExpertLoads
from blockyard.services.gpu_worker.startup.cuda_link import CudaLink
from blockyard.shared.messages import Sampling, Stats

CPU = torch.device("cpu")
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_samples_of_two_layers(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    loads = ExpertLoads(torch.device(device), CudaLink(torch.device(device)) if device == "cuda" else SameMemory())
    first, second = loads.add_layer(4), loads.add_layer(4)
    assert first is not None and second is not None
    assert loads.count(Stats()) == Stats(), "nothing has run"
    first.watch(2).copy_(torch.tensor([6, 0, 1, 1]))  # 4 rows
    second.watch(2).copy_(torch.tensor([2, 2, 2, 2]))
    if device == "cuda":
        loads.count(Stats(steps_total=1))  # starts the copy
        torch.cuda.synchronize()
    found = loads.count(Stats(steps_total=2, running=3))
    assert (found.expert_samples_total, found.experts_hit_total, found.running) == (1, 7, 3)
    assert found.experts_hit_if_even_total == round(2 * 4 * (1 - 0.5**4))
    assert found.expert_loads == [3.0, 1.0]
    again = loads.count(Stats(steps_total=2))
    assert again.expert_samples_total == 1, "no step since"


def test_loads_are_of_several_samples() -> None:
    loads = ExpertLoads(CPU, SameMemory())
    layer = loads.add_layer(2)
    assert layer is not None
    for step, pairs in enumerate(([4, 0], [0, 4])):
        layer.watch(1).copy_(torch.tensor(pairs))
        found = loads.count(Stats(steps_total=step + 1))
    assert found.expert_loads == [pytest.approx(4 / 3.9, abs=1e-3)]
    assert (found.experts_hit_total, found.expert_samples_total) == (2, 2)


def test_trial_steps_are_not_sampled() -> None:
    loads = ExpertLoads(CPU, SameMemory())
    loads.clear()
    layer = loads.add_layer(4)
    assert layer is not None
    layer.watch(1).copy_(torch.tensor([9, 0, 0, 0]))  # equal rows
    loads.clear()
    assert loads.count(Stats(steps_total=1)).expert_samples_total == 0
    layer.watch(1).copy_(torch.tensor([1, 1, 1, 1]))
    assert loads.count(Stats(steps_total=2)).experts_hit_total == 4


def test_a_runner_forgets_what_its_background_work_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    runner = start(tmp_path, load_format="dummy", max_model_len=64)
    driver = Driver(runner, num_slots=3)
    driver.add([5, 9, 20], Sampling(temperature=0.0, max_tokens=2, ignore_eos=True))
    driver.run()

    monkeypatch.setattr(runner.loop.steps, "runs_ahead", True)  # as on a GPU
    monkeypatch.setattr(runner.loop.steps, "idle", lambda: True)
    assert runner.idle(), "work is left"
    assert runner.count(Stats(steps_total=2)) == Stats(steps_total=2)


def test_loads_are_kept_where_no_background_work_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    runner = start(tmp_path, load_format="dummy", max_model_len=64)
    monkeypatch.setattr(runner.loop.steps, "runs_ahead", True)  # as on a GPU
    assert not runner.idle(), "the last piece"
    driver = Driver(runner, num_slots=3)
    driver.add([5, 9, 20], Sampling(temperature=0.0, max_tokens=2, ignore_eos=True))
    driver.run()
    assert not runner.idle()
    assert runner.count(Stats(steps_total=2)).expert_samples_total == 1


def test_layers_that_are_not_counted() -> None:
    loads = ExpertLoads(CPU, SameMemory())
    assert all(loads.add_layer(8) is not None for _ in range(MOST_LAYERS))
    assert loads.add_layer(8) is None
    other = ExpertLoads(CPU, SameMemory())
    assert other.add_layer(8) is not None and other.add_layer(16) is None
    assert ExpertLoads(CPU, SameMemory()).count(Stats(steps_total=5)) == Stats(steps_total=5)


def test_a_worker_counts_its_steps(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    runner = start(tmp_path, load_format="dummy", max_model_len=64)
    driver = Driver(runner, num_slots=3)
    for i in range(3):
        driver.add([5 + i, 9, 20], Sampling(temperature=0.0, max_tokens=2, ignore_eos=True))
    driver.run()
    found = runner.count(Stats(steps_total=2))
    assert len(found.expert_loads) == 3 and found.expert_samples_total == 1
    assert found.experts_hit_if_even_total == round(3 * 8 * (1 - 0.75**3)), "three layers, three rows"
    assert 6 <= found.experts_hit_total <= 18

    silent = start(tmp_path, load_format="dummy", max_model_len=64, expert_metrics=False)
    assert silent.model.table.expert_loads is None
    assert silent.count(Stats(steps_total=2)) == Stats(steps_total=2)

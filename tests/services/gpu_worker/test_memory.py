"""The memory plan's arithmetic, and errors that name the flag to change."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import BY_NAME, start

from blockyard.services.gpu_worker.kv.pool import block_bytes
from blockyard.services.gpu_worker.memory import (
    GIB,
    KVMemoryNeed,
    length_that_fits,
    num_seqs_for,
    plan_bytes,
    plan_cpu,
    plan_cuda,
)
from blockyard.shared.errors import LoadError

KIB = 1 << 10


def need(max_model_len: int = 4096, block_bytes: int = 96 * KIB, max_num_seqs: int = 256) -> KVMemoryNeed:
    return KVMemoryNeed(
        block_size=16,
        block_bytes=block_bytes,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
    )


def test_cpu_defaults() -> None:
    plan = plan_cpu(need(), free_bytes=20 * GIB, cpu_kv_gib=None, override=None)
    assert plan.num_blocks == GIB // (96 * KIB)
    assert plan_cpu(need(max_num_seqs=2), 20 * GIB, None, None).num_blocks == 512  # all they can use
    one = need(max_model_len=131072, block_bytes=1024 * KIB)
    assert plan_cpu(one, 20 * GIB, None, None).num_blocks == 8192  # 8 GiB, as one sequence needs them
    assert plan_cpu(need(), 1 * GIB, None, None).num_blocks == GIB // 2 // (96 * KIB)


def test_flags_are_followed() -> None:
    assert plan_cpu(need(), 20 * GIB, 2.0, None).num_blocks == 2 * GIB // (96 * KIB)
    plan = plan_cpu(need(), 20 * GIB, 2.0, 300)
    assert plan.num_blocks == 300
    assert "300 blocks by --num-gpu-blocks-override" in plan.notes[0]
    assert plan_cuda(need(), 80 * GIB, 0.9, 0, 0, 300).num_blocks == 300


def test_cuda_arithmetic_is_shown() -> None:
    plan = plan_cuda(need(), 80 * GIB, 0.9, weights_bytes=16 * GIB, peak_bytes=2 * GIB, override=None)
    assert plan.num_blocks == 54 * GIB // (96 * KIB)
    assert plan.notes[0] == (
        "KV memory: 80.00 GiB x 0.9 (--gpu-memory-utilization) - 16.00 GiB weights - 2.00 GiB for a step = 54.00 GiB"
    )
    assert plan.notes[1].startswith(f"KV blocks: {plan.num_blocks} of 16 tokens, 96 KiB each")
    assert "x max_model_len 4096" in plan.notes[2]


def test_memory_of_graphs_is_reserved_and_reported() -> None:
    plan = plan_cuda(need(), 80 * GIB, 0.9, 16 * GIB, 2 * GIB, None, graph_bytes=GIB)
    assert plan.num_blocks == 53 * GIB // (96 * KIB)
    assert "- 2.00 GiB for a step - 1.00 GiB for CUDA graphs = 53.00 GiB" in plan.notes[0]


def test_memory_of_penalties_is_reserved_and_reported() -> None:
    plan = plan_cuda(need(), 80 * GIB, 0.9, 16 * GIB, 2 * GIB, None, graph_bytes=GIB, penalties_bytes=GIB)
    assert plan.num_blocks == 52 * GIB // (96 * KIB)
    assert "- 1.00 GiB for CUDA graphs - 1.00 GiB for penalties (--run-ahead-penalties) = 52.00 GiB" in plan.notes[0]


def refused(*args: object, cuda: bool = False) -> str:
    with pytest.raises(LoadError) as error:
        (plan_cuda if cuda else plan_cpu)(*args)  # type: ignore[operator]
    assert str(error.value).startswith("not enough memory for one sequence: ")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_too_little_names_the_flag_and_a_value_that_works() -> None:
    line = refused(need(), 20 * GIB, 0.01, None)
    value = float(re.search(r"set --cpu-kv-gib ([\d.]+) or more", line)[1])  # type: ignore[index]
    plan_cpu(need(), 20 * GIB, value, None)
    shorter = int(re.search(r"--max-model-len (\d+) or less", line)[1])  # type: ignore[index]
    plan_cpu(need(max_model_len=shorter), 20 * GIB, 0.01, None)

    line = refused(need(), 20 * GIB, None, 255)
    assert "set --num-gpu-blocks-override 256 or more, or set --max-model-len 4080 or less" in line

    line = refused(need(131072), 80 * GIB, 0.25, 16 * GIB, 3.9 * GIB, None, cuda=True)
    value = float(re.search(r"--gpu-memory-utilization ([\d.]+) or more", line)[1])  # type: ignore[index]
    plan_cuda(need(131072), 80 * GIB, value, 16 * GIB, int(3.9 * GIB), None)

    line = refused(need(131072, 1024 * KIB), 16 * GIB, 0.9, 15 * GIB, 2 * GIB, None, cuda=True)
    assert "--gpu-memory-utilization" not in line  # no fraction of this GPU is enough
    assert "a smaller --max-model-len" in line


def test_kv_memory_in_bytes_is_taken_as_it_is() -> None:
    plan = plan_bytes(need(), GIB, 20 * GIB)
    assert plan.num_blocks == GIB // (96 * KIB)
    assert plan.notes[0] == "KV memory: 1.00 GiB by --kv-cache-memory-bytes"
    with pytest.raises(LoadError, match=f"--kv-cache-memory-bytes {2 * GIB}: there is room for {GIB}"):
        plan_bytes(need(), 2 * GIB, GIB)
    with pytest.raises(LoadError) as error:
        plan_bytes(need(), 10 * 96 * KIB, GIB)
    value = int(re.search(r"set --kv-cache-memory-bytes (\d+) or more", str(error.value))[1])  # type: ignore[index]
    plan_bytes(need(), value, GIB)
    with pytest.raises(LoadError):
        plan_bytes(need(), value - 1, GIB)


def test_the_context_is_shortened_to_what_fits() -> None:
    fitted = replace(need(), shorten=True)
    assert plan_cpu(need(), 20 * GIB, None, 256).num_blocks == 256, "one sequence has room"
    plan = plan_cpu(fitted, 20 * GIB, None, 30)
    assert (plan.num_blocks, length_that_fits(fitted, 30)) == (30, 480)
    assert "a sequence has 480 of 4096 tokens at most (--max-model-len auto)" in plan.notes[0]
    assert plan.notes[2] == "KV room: 480 tokens, 1.0 x max_model_len 480"
    plan = plan_cuda(replace(need(131072), shorten=True), 80 * GIB, 0.25, 16 * GIB, int(3.9 * GIB), None)
    assert 0 < length_that_fits(need(131072), plan.num_blocks) == plan.num_blocks * 16 < 131072
    with pytest.raises(LoadError):
        plan_cuda(fitted, 16 * GIB, 0.9, 15 * GIB, 2 * GIB, None)  # not one block
    window = replace(need(), window=256, shorten=True)
    assert length_that_fits(window, 18) == 4096, "a sequence holds its window"
    assert length_that_fits(window, 17) == 272


def test_a_worker_offers_the_context_that_fits(tmp_path: Path) -> None:
    BY_NAME["llama"].save(tmp_path)
    runner = start(tmp_path, num_gpu_blocks_override=3, fit_max_model_len=True)
    found = runner.geometry
    assert (found.num_blocks, found.max_model_len) == (3, 3 * found.block_size)
    size = block_bytes(runner.model.shape, found.block_size, torch.float32)
    by_size = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 5 * size + 1}
    found = start(tmp_path, fit_max_model_len=True, **by_size).geometry
    assert (found.num_blocks, found.max_model_len) == (5, 5 * found.block_size)
    with pytest.raises(LoadError, match="not enough memory for one sequence"):
        start(tmp_path, **by_size)


def test_a_worker_offers_the_context_of_its_settings(tmp_path: Path) -> None:
    BY_NAME["llama"].save(tmp_path)
    found = start(
        tmp_path, max_num_seqs=5, max_num_batched_tokens=40, num_gpu_blocks_override=30, max_model_len=100
    ).geometry
    assert (found.max_num_seqs, found.max_num_batched_tokens, found.num_blocks, found.max_model_len) == (5, 40, 30, 100)


@pytest.mark.parametrize(
    ("tokens", "most", "seqs"),
    [(0, 1024, 256), (434_528, 1024, 832), (300_000, 1024, 576), (9**9, 1024, 1024), (9**9, 300, 300)],
)
def test_the_number_of_sequences_follows_from_kv_room(tokens: int, most: int, seqs: int) -> None:
    assert num_seqs_for(tokens, most) == seqs

"""Sums over ranks, each rank in a process of its own, in Triton's interpreter: their buffers are shared memory."""

import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import pytest
import torch
from torch import Tensor

from blockyard.kernels.all_reduce.peer_buffers import PeerBuffers, empty_buffer, make_buffers
from blockyard.kernels.all_reduce.references import sum_add_rms_norm_reference, sum_ranks_reference
from blockyard.kernels.all_reduce.sum_ranks import sum_add_rms_norm, sum_ranks

CPU = torch.device("cpu")
HALF_BYTES = 1 << 16
EPS = 1e-5
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's ranks are on the CPU")
Run = Callable[[int, PeerBuffers], list[Tensor]]


def run_ranks(size: int, run: Run) -> list[list[Tensor]]:
    """Returns what `run` returns in each rank's process. The buffers are empty afterwards, as before."""
    memory = [empty_buffer(HALF_BYTES, CPU).share_memory_() for _ in range(size)]
    fork = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = fork.Pipe()
        process = fork.Process(target=_run_rank, args=(theirs, rank, memory, run))
        process.start()
        pipes.append(ours)
        processes.append(process)
    results = [[torch.from_numpy(one) for one in pipe.recv()] for pipe in pipes]
    for process in processes:
        process.join(10)
        assert process.exitcode == 0
    untouched = empty_buffer(HALF_BYTES, CPU)
    assert all(torch.equal(one, untouched) for one in memory)
    return results


def _run_rank(pipe: Connection, rank: int, memory: Sequence[Tensor], run: Run) -> None:
    buffers = make_buffers(rank, [one.data_ptr() for one in memory], HALF_BYTES, CPU)
    results = run(rank, buffers)
    assert not buffers.failed.item()
    assert not buffers.reported.item()
    pipe.send([one.numpy() for one in results])


def parts_of(size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[Tensor]:
    random_numbers = torch.Generator().manual_seed(seed)
    parts = [torch.randn(shape, generator=random_numbers).to(dtype) for _ in range(size)]
    for part in parts:
        part.view(-1)[::7] = -0.0  # the bits of a word that has not arrived
    return parts


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("two_steps", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sums_are_those_of_the_reference_on_all_ranks(size: int, two_steps: bool, dtype: torch.dtype) -> None:
    shapes = [(1, 8), (5, 24), (3, 1000), (0, 8), (1, 4096)]
    inputs = [parts_of(size, shape, dtype, seed) for seed, shape in enumerate(shapes)]

    def run(rank: int, buffers: PeerBuffers) -> list[Tensor]:
        delays = random.Random(rank)
        results = []
        for parts in inputs:
            time.sleep(delays.random() * 0.01)
            results.append(sum_ranks(parts[rank], buffers, two_steps))
        return results

    found = run_ranks(size, run)
    for one in found:
        for parts, result in zip(inputs, one, strict=True):
            assert torch.equal(result, sum_ranks_reference(parts))


@pytest.mark.parametrize(("size", "two_steps"), [(2, False), (3, True)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sums_are_added_to_the_residual_and_normalised(size: int, two_steps: bool, dtype: torch.dtype) -> None:
    shapes = [(1, 64), (7, 40), (2, 200)]
    inputs = [parts_of(size, shape, dtype, seed) for seed, shape in enumerate(shapes)]
    residuals = [one[0] for one in (parts_of(1, shape, dtype, 9) for shape in shapes)]
    weights = [1 + one[0][0] / 8 for one in (parts_of(1, shape, dtype, 5) for shape in shapes)]

    def run(rank: int, buffers: PeerBuffers) -> list[Tensor]:
        results = []
        for parts, residual, weight in zip(inputs, residuals, weights, strict=True):
            rows = torch.zeros(len(residual), residual.shape[1] + 3, dtype=dtype)[:, : residual.shape[1]]
            rows.copy_(residual)
            total = torch.empty_like(residual)
            results.append(sum_add_rms_norm(parts[rank], rows, weight, EPS, buffers, total, two_steps))
            assert torch.equal(rows, residual)
            results.append(total)
            results.append(sum_add_rms_norm(parts[rank], rows, weight, EPS, buffers, None, two_steps))
            results.append(rows)
        return results

    found = run_ranks(size, run)
    for one in found[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, found[0], strict=True))
    results = iter(found[0])
    for parts, residual, weight in zip(inputs, residuals, weights, strict=True):
        total, normed = sum_add_rms_norm_reference(parts, residual, weight, EPS)
        for _ in range(2):
            torch.testing.assert_close(next(results), normed)
            assert torch.equal(next(results), total)


def test_sums_of_all_kinds_follow_each_other() -> None:
    """Each uses the half of the buffers that the last but one has emptied, whatever its shape and dtype."""
    order = random.Random(4)
    kinds = [
        (order.choice([(1, 8), (3, 24), (2, 300), (5, 16)]), order.choice([torch.float16, torch.float32]), n % 5 < 2)
        for n in range(40)
    ]

    def run(rank: int, buffers: PeerBuffers) -> list[Tensor]:
        delays, results = random.Random(rank), []
        for number, (shape, dtype, two_steps) in enumerate(kinds):
            part, total = parts_of(3, shape, dtype, number)[rank], torch.ones(shape, dtype=dtype)
            time.sleep(delays.random() * 0.003 if delays.random() < 0.3 else 0)
            if number % 3:
                total = sum_ranks(part, buffers, two_steps)
            else:
                sum_add_rms_norm(part, total, total[0].clone(), EPS, buffers, None, two_steps)
            results.append(total)
        return results

    for results in run_ranks(3, run):
        for number, (total, (shape, dtype, _)) in enumerate(zip(results, kinds, strict=True)):
            wanted = sum_ranks_reference(parts_of(3, shape, dtype, number)).float()
            assert torch.equal(total, (wanted if number % 3 else wanted + 1).to(dtype))


def test_a_rank_that_gets_no_part_gives_up_and_says_so() -> None:
    memory = [empty_buffer(HALF_BYTES, CPU) for _ in range(2)]
    buffers = make_buffers(0, [one.data_ptr() for one in memory], HALF_BYTES, CPU, most_polls=3)
    sum_ranks(torch.ones(8), buffers)
    assert buffers.failed.item() == buffers.reported.item() == 1


def test_other_tensors_are_refused() -> None:
    memory = [empty_buffer(HALF_BYTES, CPU) for _ in range(2)]
    buffers = make_buffers(0, [one.data_ptr() for one in memory], HALF_BYTES, CPU)
    rows = torch.zeros(4, 16)
    for bad in (torch.zeros(8, dtype=torch.int32), torch.zeros(8, 2).t(), torch.zeros(HALF_BYTES)):
        with pytest.raises(ValueError, match=r"floats of 16|larger than the buffers"):
            sum_ranks(bad, buffers)
    for residual, weight in ((rows[:3], rows[0]), (rows, rows[0, :3]), (rows.half(), rows[0]), (rows[0], rows[0])):
        with pytest.raises(ValueError, match=r"do not fit|dtypes"):
            sum_add_rms_norm(rows, residual, weight, EPS, buffers)
    with pytest.raises(ValueError, match="contiguous"):
        sum_add_rms_norm(rows, torch.zeros(16, 4).t(), rows[0], EPS, buffers)
    with pytest.raises(ValueError, match="multiple of 64"):
        empty_buffer(24, CPU)

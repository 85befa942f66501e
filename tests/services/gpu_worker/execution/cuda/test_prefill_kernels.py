"""Kernels of prefill attention are compiled before a stream needs them."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tiny_models import model_shape

from blockyard.kernels.attention.paged_prefill import paged_prefill
from blockyard.kernels.attention.prefill_splits import SPLIT_MIN_LEN
from blockyard.services.gpu_worker.attention.choice import AttentionKernel
from blockyard.services.gpu_worker.attention.triton_attention import KERNELS, PagedPrefill
from blockyard.services.gpu_worker.execution.cuda import prefill_kernels
from blockyard.services.gpu_worker.kv.pool import KVPool

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pool(dtype: torch.dtype, *windows: int | None, head_dim: int = 16) -> KVPool:
    shape = model_shape(num_heads=4, kv_heads=2, head_dim=head_dim, scale=0.25, windows=windows)
    return KVPool(shape, 2, 16, dtype, DEVICE)


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float8_e4m3fn])
def test_each_window_alone_and_shared(kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def record(*args: Any) -> None:
        rules, longest = args[4:6]
        ran.append((rules.window or 0, longest >= SPLIT_MIN_LEN))
        paged_prefill(*args)

    monkeypatch.setitem(KERNELS, AttentionKernel.PAGED_PREFILL, PagedPrefill(record))
    if DEVICE.type == "cpu":  # Triton's interpreter replaces functions of triton.language during a run: one thread only
        monkeypatch.setattr(prefill_kernels, "compile_threads", lambda most: 1)
    prefill_kernels.compile_prefills(pool(kv_dtype, None, 5000, None), torch.float16)
    assert sorted(ran) == [(0, False), (0, True), (5000, False), (5000, True)]


@pytest.mark.parametrize(
    ("head_dim", "compiled"),
    [
        (64, [("hopper", 1023), ("hopper", 1 << 20), ("triton", 1)]),  # few keys are for the other kernel
        (256, [("hopper", 1023), ("hopper", 1 << 20)]),
        (96, [("triton", 1023), ("triton", 1 << 20)]),
    ],
)
def test_all_kernels_that_steps_may_take(
    head_dim: int, compiled: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, int]] = []
    monkeypatch.setattr(prefill_kernels, "runs_hopper_kernels", lambda device: True)
    for name, kernel in (("triton", AttentionKernel.PAGED_PREFILL), ("hopper", AttentionKernel.PAGED_PREFILL_HOPPER)):
        record = PagedPrefill(lambda *args, name=name: ran.append((name, args[5])))
        monkeypatch.setitem(KERNELS, kernel, record)
    prefill_kernels.compile_prefills(pool(torch.bfloat16, None, head_dim=head_dim), torch.bfloat16)
    assert sorted(ran) == compiled


def test_a_compile_error_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setitem(KERNELS, AttentionKernel.PAGED_PREFILL, PagedPrefill(fail))
    prefill_kernels.compile_prefills(pool(torch.float16, None), torch.float16)
    assert "no such instruction" in caplog.text


@pytest.mark.parametrize("threads", [1, 2])
def test_compile_threads_are_limited(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setitem(KERNELS, AttentionKernel.PAGED_PREFILL, PagedPrefill(lambda *_: None))
    monkeypatch.setattr(prefill_kernels, "compile_threads", lambda most: threads)
    monkeypatch.setattr(prefill_kernels, "ThreadPoolExecutor", lambda n: made.append(n) or ThreadPoolExecutor(n))
    prefill_kernels.compile_prefills(pool(torch.float16, None), torch.float16)
    assert made == [threads]

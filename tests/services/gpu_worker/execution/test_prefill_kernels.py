"""Kernels of prefill attention are compiled before a stream needs them."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tiny_models import model_shape

from blockyard.kernels.attention import paged_prefill as kernels
from blockyard.services.gpu_worker.execution import prefill_kernels
from blockyard.services.gpu_worker.kv.pool import KVPool

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pool(dtype: torch.dtype, *windows: int | None) -> KVPool:
    shape = model_shape(
        num_heads=4,
        kv_heads=2,
        head_dim=16,
        scale=0.25,
        windows=windows,
    )
    return KVPool(shape, 2, 16, dtype, DEVICE)


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float8_e4m3fn])
def test_each_window_alone_and_shared(kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, attend = [], kernels.paged_prefill

    def record(*args: Any, **kwargs: Any) -> None:
        window, longest = args[5:7]
        ran.append((window or 0, longest >= kernels._SPLIT_MIN_LEN))
        attend(*args, **kwargs)

    monkeypatch.setattr(prefill_kernels, "paged_prefill", record)
    if DEVICE.type == "cpu":  # Triton's interpreter replaces functions of triton.language during a run: one thread only
        monkeypatch.setattr(prefill_kernels, "compile_threads", lambda most: 1)
    prefill_kernels.compile_prefills(pool(kv_dtype, None, 5000, None), torch.float16)
    assert sorted(ran) == [(0, False), (0, True), (5000, False), (5000, True)]


def test_a_compile_error_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(prefill_kernels, "paged_prefill", fail)
    prefill_kernels.compile_prefills(pool(torch.float16, None), torch.float16)
    assert "no such instruction" in caplog.text


@pytest.mark.parametrize("threads", [1, 2])
def test_compile_threads_are_limited(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(prefill_kernels, "paged_prefill", lambda *args, **kwargs: None)
    monkeypatch.setattr(prefill_kernels, "compile_threads", lambda most: threads)
    monkeypatch.setattr(prefill_kernels, "ThreadPoolExecutor", lambda n: made.append(n) or ThreadPoolExecutor(n))
    prefill_kernels.compile_prefills(pool(torch.float16, None), torch.float16)
    assert made == [threads]

"""CUDA for tests of transfers without a GPU: DeviceArenas are in host memory, and Triton interprets the kernels.

Both ends are in this process, which real CUDA IPC does not allow. As on a GPU, a copy is reported some time after its
launch; an error of the GPU appears when a copy is waited for, and in all calls after that; an unknown handle does not
open.
"""

import contextlib
import ctypes
import secrets
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from blockyard.services.kv_transfer import arena, device_copier
from blockyard.services.kv_transfer.device.ipc_memory import HANDLE_BYTES, MappedMemory

POLLS = 3  # until a copy is complete


class FakeGpu:
    """Replaces the driver, streams and events."""

    def __init__(self) -> None:
        self.computes = threading.Event()  # while it is not set, no copy completes
        self.computes.set()
        self.error = ""  # of a kernel; it stays
        self.refuses = ""  # why memory cannot be exported
        self.open: list[int] = []  # addresses that are mapped
        self.on_side_stream = False  # what this thread launches and allocates now
        self.handles: dict[bytes, int] = {}

    # as `CudaDriver`
    def start_of(self, address: int) -> int:
        return address - 512

    def export(self, address: int) -> bytes:
        if self.refuses:
            raise OSError(f"cuIpcGetMemHandle: {self.refuses} (1)")
        handle = secrets.token_bytes(HANDLE_BYTES)
        self.handles[handle] = address - 512
        return handle

    def open_handle(self, handle: bytes) -> int:
        if handle not in self.handles:
            raise OSError("cuIpcOpenMemHandle: invalid argument (1)")
        self.open.append(self.handles[handle])
        return self.handles[handle]

    def close(self, address: int) -> None:
        self.open.remove(address)

    def read(self, address: int, num_bytes: int) -> bytes:
        return ctypes.string_at(address, num_bytes)

    def check(self) -> None:
        if self.error:
            raise RuntimeError(f"CUDA error: {self.error}")


class FakeDriver:
    def __init__(self, gpu: FakeGpu) -> None:
        self.start_of, self.export, self.open = gpu.start_of, gpu.export, gpu.open_handle
        self.close, self.read = gpu.close, gpu.read


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu, self._polls = gpu, POLLS

    def query(self) -> bool:
        self._gpu.check()
        self._polls -= 1
        return self._gpu.computes.is_set() and self._polls < 0

    def synchronize(self) -> None:
        self._gpu.computes.wait(10)
        self._gpu.check()
        self._polls = 0


class FakeStream:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        self._gpu.check()
        self._gpu.on_side_stream = True
        try:
            yield
        finally:
            self._gpu.on_side_stream = False

    def record(self) -> FakeEvent:
        self._gpu.check()
        return FakeEvent(self._gpu)

    def host_tensor(self, num: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num, dtype=dtype)


def mapped_blocks(memory: MappedMemory, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor in place of `MappedBlocks`, because the interpreter takes no other pointers."""
    num = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    raw = (ctypes.c_ubyte * (8 * num)).from_address(memory.address + offset)
    raw.memory = memory  # as long as the tensor lives
    return torch.from_numpy(np.frombuffer(raw, np.int64)).as_strided(shape, strides)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()
    monkeypatch.setattr(arena, "cuda_driver", lambda: FakeDriver(gpu))
    monkeypatch.setattr(arena, "own_pool", contextlib.nullcontext)
    monkeypatch.setattr(arena, "CudaStream", lambda device: FakeStream(gpu))
    monkeypatch.setattr(device_copier, "CudaStream", lambda device: FakeStream(gpu))
    monkeypatch.setattr(device_copier, "MappedBlocks", mapped_blocks)
    return gpu

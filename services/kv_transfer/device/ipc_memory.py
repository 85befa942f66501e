"""GPU memory of one process in another of the same host, through CUDA IPC, with the driver's library.

The opening process needs its own GPU only: it may not see the owner's. If the owner ends, or frees the memory, the
memory stays until the last process has closed it, and kernels that write to it go on without a fault.
"""

import ctypes
import functools
import weakref

import torch

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag that there is
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaDriver:
    """The calls of libcuda. Each raises OSError with the driver's words if it fails."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        pointer, size, void = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        library.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), pointer]
        library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(pointer), _Handle, ctypes.c_uint]
        library.cuIpcCloseMemHandle.argtypes = [pointer]
        library.cuMemGetAddressRange_v2.argtypes = [ctypes.POINTER(pointer), ctypes.POINTER(size), pointer]
        library.cuStreamCreate.argtypes = [ctypes.POINTER(void), ctypes.c_uint]
        library.cuMemcpyDtoHAsync_v2.argtypes = [void, pointer, size, void]
        library.cuStreamSynchronize.argtypes = [void]
        library.cuStreamDestroy_v2.argtypes = [void]
        library.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]

    def start_of(self, address: int) -> int:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        code = self._library.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address)
        self._check(code, "cuMemGetAddressRange")
        return base.value

    def export(self, address: int) -> bytes:
        """Returns the handle of the whole allocation that has this address."""
        handle = _Handle()
        self._check(self._library.cuIpcGetMemHandle(ctypes.byref(handle), address), "cuIpcGetMemHandle")
        return bytes(handle.data)

    def open(self, handle: bytes) -> int:
        """Maps another process's allocation. Returns its address in this process."""
        address, given = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
        code = self._library.cuIpcOpenMemHandle_v2(ctypes.byref(address), given, _LAZY_PEER_ACCESS)
        self._check(code, "cuIpcOpenMemHandle")
        return address.value

    def close(self, address: int) -> None:
        self._check(self._library.cuIpcCloseMemHandle(address), "cuIpcCloseMemHandle")

    def read(self, address: int, num_bytes: int) -> bytes:
        """Copies device memory to the host. Waits for the copy alone: cuMemcpyDtoH would wait for all steps in flight,
        whose stream is CUDA's default one."""
        buffer, stream, library = ctypes.create_string_buffer(num_bytes), ctypes.c_void_p(), self._library
        self._check(library.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING), "cuStreamCreate")
        try:
            self._check(library.cuMemcpyDtoHAsync_v2(buffer, address, num_bytes, stream), "cuMemcpyDtoHAsync")
            self._check(library.cuStreamSynchronize(stream), "cuStreamSynchronize")
        finally:
            library.cuStreamDestroy_v2(stream)
        return buffer.raw

    def _check(self, code: int, call: str) -> None:
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise OSError(f"{call}: {(text.value or b'unknown error').decode()} ({code})")


@functools.cache
def cuda_driver() -> CudaDriver:
    """Raises OSError without a driver."""
    return CudaDriver(ctypes.CDLL("libcuda.so.1"))


class MappedMemory:
    """Another process's allocation, mapped. Unmapped when the last reference to it is gone."""

    def __init__(self, driver: CudaDriver, handle: bytes) -> None:
        """Raises OSError if the handle cannot be opened, for example in the process that exported it."""
        if len(handle) != HANDLE_BYTES:
            raise OSError(f"a CUDA IPC handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        self.address = driver.open(handle)
        self._close = weakref.finalize(self, driver.close, self.address)
        self._close.atexit = False  # the driver may have shut down


class MappedBlocks:
    """Blocks of another process: a pointer for kernels, with the shape of a tensor."""

    dtype = torch.int64

    def __init__(
        self, memory: MappedMemory, offset: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None
    ) -> None:
        """shape: [layers, num_blocks, words], or [layers, num_blocks, planes, words] with strides in words. offset: in
        bytes, of the first block."""
        self.shape, self._memory, self._offset = shape, memory, offset
        self._strides = strides or (shape[1] * shape[2], shape[2], 1)

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def data_ptr(self) -> int:
        return self._memory.address + self._offset

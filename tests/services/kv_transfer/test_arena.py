"""An arena in host memory: exported to another process, dropped and restored while that has it mapped."""

import ctypes
import fcntl
import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from kv_peers import Mapper, mapped_arenas

from blockyard.services.kv_transfer.arena import HostArena, map_arena
from blockyard.shared.process.service_main import rss_bytes

SIZE = 3 * mmap.PAGESIZE + 100
ME = 7


@pytest.fixture
def mapper() -> Iterator[Mapper]:
    with Mapper() as it:
        yield it


def test_another_process_reads_and_writes(mapper: Mapper) -> None:
    arena = HostArena(SIZE)
    assert arena.generation == 1 and not arena.bytes.any()
    arena.bytes[5] = 17
    handle = arena.export(ME)
    assert handle is not None and (handle.num_bytes, handle.incarnation, handle.generation) == (SIZE, ME, 1)
    mapper.map(msgspec.msgpack.decode(msgspec.msgpack.encode(handle), type=type(handle)))
    assert mapper.read(5) == 17
    mapper.write(SIZE - 1, 99)
    assert arena.bytes[SIZE - 1] == 99
    arena.bytes[6] = 3
    assert mapper.read(6) == 3


def test_dropped_memory_is_another_one(mapper: Mapper) -> None:
    arena = HostArena(SIZE)
    view = arena.bytes[10:20]
    view.fill_(4)
    old = arena.export(ME)
    assert old is not None
    mapper.map(old)
    arena.drop()
    assert arena.generation == 2 and not view.any(), "the view has the new memory"
    assert mapper.read(10) == 0, "its pages were given back"
    mapper.write(10, 66)
    arena.restore()
    view[1] = 5
    assert view.tolist() == [0, 5, *[0] * 8], "a writer to the old memory changes nothing here"
    with pytest.raises((OSError, ValueError)):
        map_arena(old)
    new = arena.export(ME)
    assert new is not None and new.generation == 2
    mapper.map(new)
    assert mapper.read(11) == 5


def test_mapped_memory_outlives_its_owner() -> None:
    with Mapper() as owner:
        mapped = map_arena(owner.export(SIZE))
        mapped[7] = 1
        owner.process.kill()
        owner.process.join()
        assert mapped[7] == 1
        mapped[:] = 2
        assert (mapped == 2).all()


def test_its_size_is_sealed() -> None:
    """Without the seal, truncating the file would kill a process that has mapped it, by SIGBUS."""
    arena = HostArena(SIZE)
    handle = arena.export(ME)
    assert handle is not None
    with pytest.raises(PermissionError):
        os.ftruncate(handle.fd, 0)
    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, os.fstat(handle.fd).st_size)
    with pytest.raises(ValueError, match="not an arena"):
        map_arena(msgspec.structs.replace(handle, fd=unsealed))
    fcntl.fcntl(unsealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(ValueError, match="other memory"):
        map_arena(msgspec.structs.replace(handle, fd=unsealed))
    os.close(unsealed)


@pytest.mark.parametrize("change", [{"pid": 2**22 + 1}, {"fd": 9999}, {"num_bytes": SIZE * 2}, {"nonce": bytes(16)}])
def test_a_wrong_handle(change: dict[str, object]) -> None:
    arena = HostArena(SIZE)
    handle = arena.export(ME)
    assert handle is not None
    with pytest.raises((OSError, ValueError)):
        map_arena(msgspec.structs.replace(handle, **change))


def test_pages_are_allocated_at_first_use_and_nothing_is_left() -> None:
    gc.collect()  # arenas that earlier tests of this process have left
    size, maps = 64 << 20, mapped_arenas()
    before, files = rss_bytes(), len(os.listdir("/proc/self/fd"))
    arena = HostArena(size)
    assert rss_bytes() - before < size // 4
    arena.bytes.fill_(1)
    assert rss_bytes() - before > 0.9 * size
    arena.drop()
    assert rss_bytes() - before < size // 4
    arena.restore()
    arena.bytes[:9] = 1
    handle = arena.export(ME)
    assert handle is not None
    mapped = map_arena(handle)
    assert mapped[:9].tolist() == [1] * 9
    view = arena.bytes[:4]
    del arena, mapped
    assert len(os.listdir("/proc/self/fd")) <= files
    assert view.tolist() == [1] * 4, "a view keeps the memory"
    del view
    assert mapped_arenas() <= maps
    assert not [name for name in os.listdir("/dev/shm") if "blockyard-kv" in name]


def test_an_arena_without_blocks() -> None:
    arena = HostArena(0)
    handle = arena.export(ME)
    assert handle is not None and arena.bytes.numel() == 0 and map_arena(handle).nbytes == 0


def test_an_exposed_address_leads_to_one_generation_only() -> None:
    """A process that writes to addresses of this one does not hear of `drop` or `hide` in time."""
    arena = HostArena(SIZE)
    address = arena.expose()
    assert address != arena.bytes.data_ptr()
    ctypes.memset(address, 7, SIZE)
    assert (arena.bytes == 7).all()
    arena.drop()
    ctypes.memset(address, 8, SIZE)
    assert (arena.bytes == 0).all()
    arena.hide(address)
    with pytest.raises(OSError, match="Bad address"):
        write_to_process(address, b"late")
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert any(line.startswith(f"{address:x}-") and "---p" in line for line in maps), "no other memory gets the address"


def write_to_process(address: int, data: bytes) -> None:
    """Writes into the memory of another process, as CMA does it."""
    libc = ctypes.CDLL(None, use_errno=True)
    words = ctypes.c_uint64 * 2
    buffer = ctypes.create_string_buffer(data)
    own, theirs = words(ctypes.addressof(buffer), len(data)), words(address, len(data))
    if libc.process_vm_writev(os.getpid(), own, 1, theirs, 1, 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

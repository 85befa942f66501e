"""Files of weights in the memory that a reader shares with its worker."""

import itertools
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save_file

from blockyard.services.gpu_worker.lora import file_memory
from blockyard.services.gpu_worker.lora.file_memory import FileMemory, MemoryPool, file_pieces
from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits, read_modules
from blockyard.services.gpu_worker.lora.reader_frames import store_modules
from blockyard.shared.errors import AdapterError
from blockyard.shared.lora.adapter_folder import HeaderTensor


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_memory, "PIECE_BYTES", 100)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file({"a": torch.arange(130.0), "b": torch.arange(7.0)}, tmp_path / "file")
    return tmp_path / "file"


def test_a_copy_has_aligned_tensors_and_the_same_digest_with_any_number_of_threads(file: Path, tmp_path: Path) -> None:
    digests = set()
    for threads in (1, 3):
        memory = FileMemory()
        digests.add(memory.copy_safetensors(file, threads))
        content = memory.map()[:]
        assert (8 + int.from_bytes(content[:8], "little")) % 64 == 0
        found = load(content)
        assert torch.equal(found["a"], torch.arange(130.0)) and torch.equal(found["b"], torch.arange(7.0))
    before = file.read_bytes()
    file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    digests.add(FileMemory().copy_safetensors(file, 3))
    assert len(digests) == 2
    (tmp_path / "short").write_bytes(b"12345678")
    with pytest.raises(AdapterError, match="short is not a safetensors file: its header would end at byte "):
        FileMemory().copy_safetensors(tmp_path / "short", 1)


def test_a_file_that_shrinks_while_it_is_copied_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, size = os.preadv, file.stat().st_size

    def shrink_and_read(*arguments: object) -> int:
        os.truncate(file, size - 120)
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", shrink_and_read)
    with pytest.raises(AdapterError, match=rf"file had {size} bytes and {size - 120} could be read: it changes"):
        FileMemory().copy_safetensors(file, 1)
    with pytest.raises(AdapterError, match="nowhere cannot be read: No such file"):
        FileMemory().copy_safetensors(file.parent / "nowhere", 1)


def test_memory_is_given_back(file: Path) -> None:
    before = os.listdir("/proc/self/fd")
    memory = FileMemory()
    memory.copy_safetensors(file, 1)
    memory.map()
    del memory
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(("dtype", "is_copied"), [(torch.bfloat16, False), (torch.float32, True)])
def test_matrices_in_the_type_of_products_are_used_where_they_were_read(
    tmp_path: Path, dtype: torch.dtype, is_copied: bool
) -> None:
    a, b = torch.randn(8, 24, dtype=torch.bfloat16), torch.randn(40, 8, dtype=torch.bfloat16)
    save_file({"x.q_proj.lora_A.weight": a, "x.q_proj.lora_B.weight": b}, tmp_path / "adapter_model.safetensors")
    config = '{"peft_type": "LORA", "r": 8, "lora_alpha": 20, "target_modules": ["q_proj"]}'
    (tmp_path / "adapter_config.json").write_text(config)
    read = read_modules(tmp_path, AdapterLimits(dtype=dtype), threads=2)
    assert read.memory is not None
    size = read.memory.size_bytes
    [module], [places] = read.modules, store_modules(read.modules, read.memory)
    assert module.a is not None and torch.equal(module.a, a.to(dtype))
    assert module.b is not None and torch.equal(module.b, (b.float() * 2.5).to(dtype))
    assert (read.memory.size_bytes > size) == is_copied
    content = os.pread(read.memory.descriptor, read.memory.size_bytes, 0)
    for field, tensor in module.tensors():
        [place] = [one for one in places.tensors if one.field == field]
        found = torch.frombuffer(bytearray(content), dtype=dtype, count=tensor.numel(), offset=place.start)
        assert torch.equal(found.view(tensor.shape), tensor)


def test_numbers_that_the_scale_makes_too_large_are_refused(tmp_path: Path) -> None:
    a, b = torch.ones(2, 4, dtype=torch.float16), torch.full((6, 2), 60000.0, dtype=torch.float16)
    save_file({"x.q_proj.lora_A.weight": a, "x.q_proj.lora_B.weight": b}, tmp_path / "adapter_model.safetensors")
    config = '{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}'
    (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(AdapterError, match=r"the matrices of x\.q_proj are too large for float16"):
        read_modules(tmp_path, AdapterLimits(dtype=torch.float16))


@pytest.mark.parametrize("most", [120, 1000])
def test_pieces_are_a_whole_file_and_have_whole_tensors(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_memory, "MOST_PIECE_BYTES", most)
    ends = [0, 12, 12, 60, 150, 155, 400, 420]
    entries = {f"{i}": HeaderTensor("F32", [1], span) for i, span in enumerate(itertools.pairwise(ends))}
    entries["elsewhere"] = HeaderTensor("F32", [1], (430, 500))
    found = file_pieces(entries, 10, 460)
    assert [piece.end for piece in found] == [*(piece.start for piece in found[1:]), 460] and found[0].start == 10
    told = [int(name) for piece in found for name, _ in piece.tensors]
    assert told == [i for i, size in enumerate(b - a for a, b in itertools.pairwise(ends)) if 0 < size <= most]
    for piece in found:
        assert all(piece.start - 10 <= one.data_offsets[0] <= piece.end - 10 for _, one in piece.tensors)


def test_memory_is_read_into_again(file: Path, tmp_path: Path) -> None:
    """For a file of the same size, once the worker has copied it."""
    pool, size = MemoryPool(), file.stat().st_size
    memory = pool.take(size)
    memory.copy_safetensors(file, 1)
    memory.append(torch.ones(100))
    descriptor = pool.lend(memory)
    assert pool.take(size) is not memory
    pool.end_loan(descriptor, is_copied=True)
    assert pool.take(size + 1) is not memory and pool.take(size) is memory and pool.take(size) is not memory
    save_file({"a": -torch.arange(130.0), "b": torch.arange(7.0)}, tmp_path / "other")
    digest = memory.copy_safetensors(tmp_path / "other", 2)
    assert digest == FileMemory().copy_safetensors(tmp_path / "other", 1)
    assert torch.equal(load(os.pread(memory.descriptor, 10 * size, 0))["a"], -torch.arange(130.0))
    pool.lend(memory)
    pool.end_loan(descriptor, is_copied=False)
    assert pool.take(size) is not memory

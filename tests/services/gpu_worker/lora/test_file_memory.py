"""Files of weights in the memory that a reader shares with its worker."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from blockyard.services.gpu_worker.lora import file_memory
from blockyard.services.gpu_worker.lora.file_memory import FileMemory
from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits, read_modules
from blockyard.services.gpu_worker.lora.reader_frames import store_modules
from blockyard.shared.errors import AdapterError


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_memory, "PIECE_BYTES", 100)


def test_a_copied_file_has_the_same_digest_with_any_number_of_threads(tmp_path: Path) -> None:
    content = os.urandom(1234)
    (tmp_path / "file").write_bytes(content)
    digests = set()
    for threads in (1, 3):
        memory = FileMemory()
        digests.add(memory.copy_file(tmp_path / "file", threads))
        assert memory.map()[:] == content
    (tmp_path / "file").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    digests.add(FileMemory().copy_file(tmp_path / "file", 3))
    assert len(digests) == 2


def test_a_file_that_shrinks_while_it_is_copied_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, read = tmp_path / "file", os.preadv
    file.write_bytes(bytes(1000))

    def shrink_and_read(*arguments: object) -> int:
        os.truncate(file, 350)
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", shrink_and_read)
    with pytest.raises(AdapterError, match=r"file had 1000 bytes and 350 could be read: it changes"):
        FileMemory().copy_file(file, 1)
    with pytest.raises(AdapterError, match="nowhere cannot be read: No such file"):
        FileMemory().copy_file(tmp_path / "nowhere", 1)


def test_memory_is_given_back(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    before = os.listdir("/proc/self/fd")
    memory = FileMemory()
    memory.copy_file(tmp_path / "file", 1)
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
    assert (read.memory.size_bytes > size) == is_copied and size == os.path.getsize(
        tmp_path / "adapter_model.safetensors"
    )
    content = os.pread(read.memory.descriptor, read.memory.size_bytes, 0)
    for field, tensor in module.tensors():
        [place] = [one for one in places.tensors if one.field == field]
        found = torch.frombuffer(bytearray(content), dtype=dtype, count=tensor.numel(), offset=place.start)
        assert torch.equal(found.view(tensor.shape), tensor)

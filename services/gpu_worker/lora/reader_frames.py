"""Frames between a worker and its reader process, and where an adapter's tensors are in the memory that both map."""

import os
from collections.abc import Sequence
from hashlib import blake2b

import msgspec
import torch

from blockyard.services.gpu_worker.child_processes.frame_socket import ControlFrame
from blockyard.services.gpu_worker.lora.added_tokens.tokenizer_check import AdapterTexts
from blockyard.services.gpu_worker.lora.file_memory import FileMemory
from blockyard.services.gpu_worker.lora.module_tensors import ModuleTensors
from blockyard.shared.lora.adapter_config import AdapterConfig

FORM_BYTES = 16


class PromptSettings(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Limits of prompt adapters."""

    max_tokens: int
    width: int
    dtype: str


class ReaderSettings(ControlFrame, frozen=True):
    """The first frame to a reader."""

    dtype: str  # of matrices, as torch calls it
    max_rank: int
    with_bias: bool
    target_modules: list[str]
    prompts: PromptSettings | None = None  # None: no prompt adapter is read
    tokenizer_path: str = ""  # of the model's tokenizer; empty: those of adapters are not read
    threads: int = 1  # that read folders
    cpu_s: int = 30  # after so much CPU time without an answer the process is ended


class ReadFolder(ControlFrame, frozen=True):
    """Asks for an adapter."""

    job: int
    path: str
    is_prompt: bool = False  # a prompt adapter; False: a LoRA adapter


class MemoryMapped(ControlFrame, frozen=True):
    """The worker has mapped the memory of an answer, and the reader closes it."""

    descriptor: int


class MemoryCopied(ControlFrame, frozen=True):
    """The worker has copied the memory of an answer, and the reader may use it again."""

    descriptor: int


class KnownForm(ControlFrame, frozen=True):
    """The worker knows the modules of adapters of this form, and is not told them any more."""

    form: bytes


class TensorPlace(msgspec.Struct, frozen=True, array_like=True, gc=False):
    field: str  # of `ModuleTensors`
    dtype: str
    shape: list[int]
    start: int  # in bytes


class ModulePlaces(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The tensors of one module."""

    name: str
    scale: float
    is_stack: bool
    tensors: list[TensorPlace]


class FolderRead(ControlFrame, frozen=True):
    """An adapter, checked as far as it can be without the model. Its modules follow."""

    job: int
    descriptor: int  # of the memory, in the reader
    size_bytes: int
    digest: bytes
    config: AdapterConfig
    num_modules: int  # 0: those of a known form, whose memory the worker copies
    notes: list[str]
    texts: AdapterTexts | None = None
    form: bytes = b""


class ModulesRead(ControlFrame, frozen=True):
    """Some modules of an adapter. It is whole with the last of `num_modules`."""

    job: int
    modules: list[ModulePlaces]


class PromptRead(ControlFrame, frozen=True):
    job: int
    vectors: bytes  # in the dtype of the settings ...
    shape: list[int]  # ... [virtual tokens, width]
    digest: bytes
    notes: list[str]


class FolderBegun(ControlFrame, frozen=True):
    """A thread reads an adapter. Sent again once the size is known."""

    job: int
    size_bytes: int = 0  # of its weights


class FolderRefused(ControlFrame, frozen=True):
    """A broken adapter."""

    job: int
    cause: str


ToReader = ReaderSettings | ReadFolder | MemoryMapped | MemoryCopied | KnownForm
FromReader = FolderBegun | FolderRead | ModulesRead | PromptRead | FolderRefused


def store_modules(modules: Sequence[ModuleTensors], memory: FileMemory) -> list[ModulePlaces]:
    """Copies those tensors into the memory that are not there yet. Returns where all are."""
    places = list[ModulePlaces]()
    for module in modules:
        own: list[TensorPlace] = []
        for field, tensor in module.tensors():
            start = memory.start_of(tensor)
            start = memory.append(tensor) if start is None else start
            own.append(TensorPlace(field, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start))
        places.append(ModulePlaces(module.name, module.scale, module.is_stack, own))
    return places


def form_of(config: AdapterConfig, places: Sequence[ModulePlaces], texts: AdapterTexts | None) -> bytes:
    """A digest of all that an adapter's arrangement depends on: adapters that share it differ in numbers alone.

    Empty for one whose numbers decide on its arrangement, and one with more than pairs of matrices.
    """
    fields = {one.field for module in places for one in module.tensors}
    if texts is not None or not fields <= {"a", "b"} or any(one.is_stack for one in places):
        return b""
    others = msgspec.structs.replace(config, lora_alpha=0)  # the scale is in the matrices
    return blake2b(msgspec.msgpack.encode((others, places)), digest_size=FORM_BYTES).digest()


class ArrivingModules:
    """The modules of one adapter, as their frames come."""

    def __init__(self, path: str, read: FolderRead) -> None:
        """path: of the memory. Raises OSError if it is gone."""
        self.read, self.modules = read, list[ModuleTensors]()
        self.memory = FileMemory(os.open(path, os.O_RDWR | os.O_CLOEXEC), read.size_bytes)

    @property
    def is_whole(self) -> bool:
        return len(self.modules) == self.read.num_modules

    def add(self, frame: ModulesRead) -> None:
        for places in frame.modules:
            module = ModuleTensors(places.name, places.scale, is_stack=places.is_stack)
            for one in places.tensors:
                setattr(module, one.field, self._tensor(one))
            self.modules.append(module)

    def _tensor(self, one: TensorPlace) -> torch.Tensor:
        dtype, count = getattr(torch, one.dtype), torch.Size(one.shape).numel()
        if not count:
            return torch.empty(one.shape)
        return torch.frombuffer(self.memory.map(), dtype=dtype, count=count, offset=one.start).view(one.shape)

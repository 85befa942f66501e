"""An adapter in host memory, and the places of a worker that adapters are put into."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from blockyard.services.gpu_worker.lora.device.packed_adapter import PackedAdapter
from blockyard.services.gpu_worker.lora.file_memory import FileMemory
from blockyard.services.gpu_worker.lora.joined_deltas import JoinedDeltas
from blockyard.services.gpu_worker.lora.targets import Delta
from blockyard.services.gpu_worker.lora.token_rows import TokenDeltas
from blockyard.shared.messages import AddedToken

Deltas = dict[int, list[Delta]]  # by the index in `targets.adapted_layers`


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter in host memory, as the model's products need it."""

    digest: bytes
    deltas: Deltas
    tokens: TokenDeltas | None = None  # of embedding and head
    joined: Mapping[int, JoinedDeltas] = field(default_factory=dict)  # of linear layers, on the CPU
    long_factor: int = 1  # of the context, and of positions in rotations
    max_len: int = 0  # tokens of its longest sequence; 0: as without it
    added_texts: Sequence[AddedToken] | None = None  # of its own tokenizer; None: prompts are the model's tokenizer's
    packed: PackedAdapter | None = None  # what a device copies, in the place of deltas and rows

    @property
    def num_added(self) -> int:
        """Tokens behind the model's vocabulary."""
        return 0 if self.tokens is None else self.tokens.num_added

    @property
    def size_bytes(self) -> int:
        if self.packed is not None:
            return self.packed.size_bytes
        found = sum(one.nbytes for deltas in self.deltas.values() for delta in deltas for one in delta.tensors())
        return found + (0 if self.tokens is None else sum(one.nbytes for one in self.tokens.tensors()))


def prepare_alike(template: HostAdapter, digest: bytes, memory: FileMemory) -> Generator[bool, None, HostAdapter]:
    """As `AdapterPlaces.prepare`, of another adapter of the same form as `template`, which need not have its bytes.

    memory: that it was read into.
    """
    packed = template.packed
    assert packed is not None and packed.copy_alike is not None
    copied = packed.copy_alike(memory)
    while not copied.done():
        yield False
    return replace(template, digest=digest, packed=replace(packed, chunks=copied.result()))


class AdapterPlaces(Protocol):
    """The places of a model whose linear layers are adapted. Made once the kernels of the layers are picked."""

    num_places: int

    @property
    def size_bytes(self) -> int:
        """Memory of the device."""

    def prepare(self, adapter: HostAdapter, memory: FileMemory | None = None) -> Generator[bool, None, HostAdapter]:
        """Moves an adapter to the host memory that `put` takes, in pieces between steps. Yields whether the next piece
        can be computed now, or waits for a thread. May take the deltas out of the adapter. Raises AdapterError.

        memory: that it was read into, if others of its form may be moved by `prepare_alike`. It may be closed."""

    def put(self, place: int, adapter: HostAdapter) -> None:
        """The adapter of the plans that are launched from here on. No step in flight reads the place."""

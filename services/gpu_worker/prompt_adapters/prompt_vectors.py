"""The vectors of prompt adapters in host memory, and which slots begin with them."""

import itertools
import weakref

import numpy as np
import torch
from torch import Tensor

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.host_link import HostLink, put
from blockyard.services.gpu_worker.interfaces import LoadedAdapter
from blockyard.services.gpu_worker.lora.reader_client import AdapterReader, NotRead
from blockyard.services.gpu_worker.slots import Slots
from blockyard.services.gpu_worker.step import InputVectors
from blockyard.shared.messages import SlotStart


class PromptVectors:
    """Implements `AdapterHost` for prompt adapters.

    A sequence keeps the vectors that it started with. A step copies those of its own tokens to the device: only steps
    with the first tokens of a prompt do.
    """

    def __init__(self, reader: AdapterReader, device: torch.device, link: HostLink) -> None:
        self._reader, self._device, self._link = reader, device, link
        self._held: dict[int, Tensor] = {}  # [virtual tokens, width], by the scheduler's number
        self._of_slot: dict[int, Tensor] = {}
        self._asked: dict[int, int] = {}  # adapters, by job
        self._jobs = itertools.count(-1, -1)  # those of LoRA adapters are above 0
        weakref.finalize(self, reader.close)

    # the host of adapters

    @property
    def is_loading(self) -> bool:
        return bool(self._asked)

    def load(self, adapter: int, path: str) -> None:
        job = next(self._jobs)
        self._asked[job] = adapter
        self._reader.ask(job, path, is_prompt=True)

    def drop(self, adapter: int) -> None:
        self._held.pop(adapter, None)

    def reset(self) -> None:
        self._asked.clear()
        self._held.clear()
        self._of_slot.clear()

    def poll(self, *, is_idle: bool = False) -> list[LoadedAdapter]:
        done: list[LoadedAdapter] = []
        for job, read in self._reader.receive_prompts():
            adapter = self._asked.pop(job, None)
            if adapter is None:
                continue  # it was asked for before a reset
            if isinstance(read, NotRead):
                done.append(LoadedAdapter(adapter, error=read.cause, status=read.status))
                continue
            vectors = self._link.host_tensor(read.vectors.shape, read.vectors.dtype)
            self._held[adapter] = vectors.copy_(read.vectors)
            num_tokens, size = len(vectors), vectors.nbytes
            done.append(LoadedAdapter(adapter, read.digest, size, notes=read.notes, num_virtual_tokens=num_tokens))
        return done

    # slots

    def start(self, start: SlotStart) -> str:
        """A slot starts. Returns why it cannot run; empty: it can."""
        self._of_slot.pop(start.slot, None)
        if start.prompt_adapter is None:
            return ""
        vectors = self._held.get(start.prompt_adapter)
        if vectors is None or len(vectors) != start.num_virtual_tokens:
            return f"prompt adapter {start.prompt_adapter} is not in this worker"
        self._of_slot[start.slot] = vectors
        return ""

    def inputs(self, table: Slots, slots: Ints, positions: Ints, first_row: int = 0) -> InputVectors | None:
        """The vectors of a step's tokens from `first_row` on; None: their inputs are their ids.

        slots, positions [tokens]: those of one slot are side by side, and their positions follow each other.
        """
        rows = np.flatnonzero(positions < table.num_virtual[slots])
        if not len(rows):
            return None
        owners, begins = slots[rows], positions[rows]
        starts = np.flatnonzero(np.diff(owners, prepend=-1))  # of each slot's run of rows
        parts: list[Tensor] = []
        for at, end in zip(starts.tolist(), [*starts[1:].tolist(), len(rows)], strict=True):
            first = int(begins[at])
            part = self._of_slot[int(owners[at])][first : first + end - at]
            parts.append(part.to(self._device, non_blocking=True))
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        return InputVectors(put(rows + first_row, self._device, self._link), values)

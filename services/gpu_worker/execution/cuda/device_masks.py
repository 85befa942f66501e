"""The memory of the matcher processes where the device reads masks and writes tokens."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.kernels.sampling.sampling_state import MaskTensors, RowMasks
from blockyard.kernels.slots.slot_state import Field, SlotState
from blockyard.services.gpu_worker.host_link import HostLink
from blockyard.services.gpu_worker.structured_output.mask_memory import num_mask_words
from blockyard.services.gpu_worker.structured_output.matcher_processes import MatcherProcesses

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SlotMasks:
    """Regions of a `MaskMemory`; on a GPU in pinned memory. They may have more slots than the device."""

    words: Tensor  # [slots, 2, ceil(vocab / 32)] int32
    tags: Tensor  # [slots, 2] int64
    sampled: Tensor  # [slots] int64
    vocab_size: int
    owner_of: Callable[[int], int]  # of a slot that has started; 0: it has no constraint
    shared: object = None  # what keeps the memory pinned

    @classmethod
    def unused(cls, num_slots: int, vocab_size: int, device: torch.device) -> "SlotMasks":
        """Makes masks without a matcher, for trial steps: no slot has a constraint."""
        words = torch.zeros((num_slots, 2, num_mask_words(vocab_size)), dtype=torch.int32, device=device)
        tags = torch.zeros((num_slots, 2), dtype=torch.int64, device=device)
        return cls(words, tags, torch.zeros(num_slots, dtype=torch.int64, device=device), vocab_size, lambda slot: 0)

    def rows(self, state: SlotState, capacity: int) -> RowMasks:
        """Masks of steps of up to so many rows, on the slots in `state`."""
        num, device = state.fields.shape[1], state.fields.device
        owners, late = state.fields[Field.MASK_OWNER], state.fields[Field.MASK_LATE]
        masks = MaskTensors(owners, late, self.words[:num], self.tags[:num], self.sampled[:num])
        states = torch.ones(capacity, dtype=torch.int32, device=device)
        words = torch.zeros((capacity, self.words.shape[-1]), dtype=torch.int32, device=device)
        return RowMasks(masks, states, words, self.vocab_size)


def share_masks(matchers: MatcherProcesses | None, num_slots: int, vocab_size: int, link: HostLink) -> SlotMasks | None:
    """The masks of `matchers` for slots on the device of `link`. None: the host samples slots with a constraint."""
    if matchers is None:
        return None
    memory = matchers.share_memory(num_slots)
    if memory.shared is None:
        try:
            memory.shared = link.share(memory.mapping, memory.sampled.ctypes.data)
        except OSError as e:
            log.warning("the host samples structured output: its memory cannot be pinned: %s", e)
            return None
    words, tags, sampled = (torch.from_numpy(one) for one in (memory.masks, memory.tags, memory.sampled))
    return SlotMasks(words, tags, sampled, vocab_size, matchers.owner_of, memory.shared)

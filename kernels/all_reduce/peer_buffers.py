"""The memory through which the ranks of a host exchange parts of sums.

Each rank has a buffer that all ranks write to, and which is full of EMPTY between sums. A word that is no longer EMPTY
has arrived: no flag has to follow the data, and no fence to stand between them, so that a sum takes one way over the
link. The reader makes its words EMPTY again. (TensorRT-LLM calls this Lamport's all-reduce.)

A buffer has two halves for alternate sums. A rank writes to a half again only after it has read another sum in the
other half, of parts that others have sent after they had emptied the first one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MOST_PROGRAMS = 512  # of a kernel: each counts its sums
EMPTY_WORD = -0x7FFF8000  # 0x80008000: -0.0 twice in 16 bits. Sums of other numbers do not see that it is sent as 0
ALIGNMENT = 64  # bytes: elements are counted in multiples of 16
# reads of a part that is missing, of about 0.5 us: half a minute, in which another rank may compile kernels. A rank
# that is gone or stopped is found by the group much sooner
MOST_POLLS = 1 << 26


@dataclass(frozen=True, slots=True, eq=False)
class PeerBuffers:
    """One rank's view of the buffers of all ranks."""

    rank: int
    size: int  # number of ranks
    half_bytes: int  # of a buffer, a multiple of ALIGNMENT
    addresses: Tensor  # int64 [size], on the device: where this process has mapped each rank's buffer, and its own
    num_sums: Tensor  # int32 [MOST_PROGRAMS], on the device: sums so far, the same number for each program
    failed: Tensor  # int32 [1], on the device: not 0 once a part has not come
    reported: Tensor  # int32 [1], in pinned host memory: the same
    most_polls: int

    def one_step_bytes(self) -> int:
        """The largest part that `one_step` sums."""
        return self.half_bytes // self.size // ALIGNMENT * ALIGNMENT

    def two_step_bytes(self) -> int:
        """The largest part that `two_step` sums, if its rows divide by the ranks."""
        return self.half_bytes // 2 // ALIGNMENT * ALIGNMENT


def empty_buffer(half_bytes: int, device: torch.device) -> Tensor:
    """Returns a buffer of two halves, int32. Raises ValueError for a size that is not aligned, or from 1 GiB on."""
    if not 0 < half_bytes < 1 << 30 or half_bytes % ALIGNMENT:  # kernels count its elements in 32 bits
        raise ValueError(f"a half has a multiple of {ALIGNMENT} bytes below 1 GiB, not {half_bytes}")
    return torch.full((half_bytes // 2,), EMPTY_WORD, dtype=torch.int32, device=device)


def make_buffers(
    rank: int, addresses: list[int], half_bytes: int, device: torch.device, most_polls: int = MOST_POLLS
) -> PeerBuffers:
    """addresses: of all ranks' `empty_buffer`, as this process has mapped them."""
    pinned = device.type == "cuda"
    return PeerBuffers(
        rank,
        len(addresses),
        half_bytes,
        torch.tensor(addresses, dtype=torch.int64, device=device),
        torch.zeros(MOST_PROGRAMS, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, pin_memory=pinned),
        most_polls,
    )

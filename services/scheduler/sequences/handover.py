"""The move of a sequence from the group that computes its prompt to the group that decodes it."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Handover:
    """Written by `Handovers`. It holds its blocks on the target, except while the ledger's transfer does."""

    source: int  # worker
    target: int  # worker
    num_tokens: int  # of the sequence: the source computes all of them, and samples the next token
    num_sequences: int  # of its request, that will run on the target
    positions: list[int]  # indexes in the block table, of the blocks to send
    target_blocks: list[int]  # reserved, one for each position
    hashes: list[bytes]  # of the target blocks
    cached: list[int]  # blocks of the sequence that the target has already
    adapter_place: int | None = None  # on the target: its adapter stays there until the blocks have landed
    transfer: int = 0  # its number; 0: the workers know nothing of it yet
    ticket: bytes = b""  # random: the sender shows it to the receiver on a link without encryption
    num_sent: int = 0  # positions
    landed: set[int] | None = None  # target blocks with contents, once the transfer has ended on the target
    is_prefilled: bool = False
    was_asked: bool = False  # the lease was over once

    @property
    def held_blocks(self) -> list[int]:
        """Blocks of the target that this handover holds, and no transfer does."""
        return self.cached if self.transfer and self.landed is None else self.cached + self.target_blocks

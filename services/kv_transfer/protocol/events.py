"""What the two ends of a transfer report to their worker. Imports no numpy: ranks send them to each other."""

import enum

import msgspec


class Received(enum.StrEnum):
    """How a transfer ended on the receiver's side. No worker writes to its blocks any more."""

    LANDED = "landed"  # all blocks, with the right checksums
    CORRUPT = "corrupt"  # all blocks were written, some with a wrong checksum
    ABORTED = "aborted"  # by the sender
    REVOKED = "revoked"  # by the receiver
    SENDER_LOST = "sender_lost"  # the link broke, or the sender's process ended


class BlocksLanded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Blocks at these positions are complete and have the right checksums. Each position is reported once."""

    number: int
    positions: list[int]


class SenderUnreachable(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The link of a transfer has broken, and its sender may still write: see `IncomingTransfers.revoke`."""

    number: int


class ReceiverEnded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A transfer has ended. Its blocks may be used for something else."""

    number: int
    outcome: Received
    landed: list[int]  # positions of all its `BlocksLanded`
    corrupt: list[int]  # positions with a wrong checksum
    detail: str = ""


IncomingEvent = BlocksLanded | SenderUnreachable | ReceiverEnded


class Sent(enum.StrEnum):
    """How a transfer ended on the sender's side. Its source blocks are not read any more."""

    WRITTEN = "written"  # all blocks; only the receiver knows whether they landed
    ABORTED = "aborted"  # by the sender
    STOPPED = "stopped"  # by the receiver
    LINK_LOST = "link_lost"


class SenderEnded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A transfer has ended: its source blocks are not read any more."""

    number: int
    outcome: Sent
    detail: str = ""

"""Transfers of KV blocks between two workers: scheduler <-> GPU worker.

A worker that prefills sends full blocks into reserved blocks of a worker that decodes. The scheduler numbers the
transfer, never twice the same, and says which blocks belong to it. `KVReceive` comes first, then the plans of the
sending worker carry a `KVSend` for each chunk of the prompt. The positions of a transfer are the indexes of
`KVReceive.blocks`; the target blocks of its sends follow one another in that order.
"""

import enum

from blockyard.shared.messages.base import Frame, FrameStruct


class KVRole(enum.StrEnum):
    """The work for which a worker group is preferred. Without a live group of a role, the others serve."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class KVReceive(Frame, frozen=True):
    """scheduler -> receiving worker: reserved blocks that another worker writes.

    From now on the worker reports no hash of `blocks` until a plan names one. It answers with KVLanded.
    """

    transfer: int
    source: int  # incarnation of the sending worker
    source_generation: int
    blocks: list[int]  # of the receiver, by position
    ticket: bytes = b""  # random; with it the sender may open one link without encryption
    source_endpoint: bytes = b""  # the sending worker's `kv_endpoint`; empty: it has one rank


class KVSend(FrameStruct, frozen=True):
    """A part of a transfer, in the plan that fills these blocks. They may be full before."""

    transfer: int
    target: int  # incarnation of the receiving worker
    target_generation: int
    target_endpoint: bytes
    blocks: list[int]  # of the sender
    target_blocks: list[int]
    is_last: bool
    ticket: bytes = b""  # as in KVReceive


class KVAbort(Frame, frozen=True):
    """scheduler -> either worker: stop, and answer with KVLanded (`is_ended`) or KVSendEnded once no block is touched.

    Repeated until it is answered. It is also answered for a transfer that the worker does not know or that has ended.
    A worker that has plans with sends of this transfer in its queue ignores those sends.
    """

    transfer: int
    is_source: bool = False  # the worker sends; for one that does not know the transfer
    sender_stopped: bool = False  # to a receiver that has answered `unreachable_sender`: the sender has ended


class KVAudit(Frame, frozen=True):
    """scheduler -> worker, every minute: which transfers are open? It answers with KVOpenTransfers."""

    number: int  # of the question


class KVOpenTransfers(Frame, frozen=True):
    """worker -> scheduler, after all that it has said of transfers before: the ones that have not ended."""

    number: int  # of the question
    transfers: list[int] = []
    blocks: list[list[int]] = []  # the worker's own, of each transfer


class KVLanded(Frame, frozen=True):
    """receiving worker -> scheduler: blocks that have landed since the last KVLanded of the transfer."""

    transfer: int
    blocks: list[int]  # whole, and their checksums right
    failed_blocks: list[int] = []  # written, with another checksum than the sender's
    is_ended: bool = False  # no worker writes to blocks of this transfer any more
    unreachable_sender: int = 0  # its incarnation: the link to it has broken, and it may still write


class KVSendEnded(Frame, frozen=True):
    """sending worker -> scheduler: no block of the transfer is read any more."""

    transfer: int
    is_complete: bool  # all blocks were written

"""What transfers need of the worker that owns the KV blocks. It imports neither torch nor zmq."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # they import torch and zmq
    from blockyard.services.kv_transfer.arena import Arena
    from blockyard.services.kv_transfer.layout import BlockLayout
    from blockyard.shared.bus.poller import Readable


class TransferBlocks(Protocol):
    """The KV blocks of a worker, as transfers to and from other workers use them. Implemented by its runner."""

    @property
    def arena(self) -> "Arena": ...

    @property
    def layout(self) -> "BlockLayout | None":
        """The layout of blocks, without `scope`; None while the scales of an 8-bit KV cache are not known."""

    def begin_send(self, transfer: int, blocks: list[int]) -> None:
        """These full blocks are read from the arena until `end`."""

    def begin_receive(self, transfer: int, blocks: list[int]) -> None:
        """Another worker writes these blocks until `end`: they have no hash now, and no KV until they have landed."""

    def landed(self, blocks: list[int]) -> None:
        """Received blocks have their KV."""

    def end(self, transfer: int) -> None:
        """Transfers no longer read or write blocks for this number."""


class SocketWatch(Protocol):
    """The loop that polls transfers: it wakes up when one of the watched sources is readable."""

    def watch(self, *sources: "Readable") -> None: ...
    def unwatch(self, *sources: "Readable") -> None: ...

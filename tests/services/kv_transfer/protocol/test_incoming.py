"""The receiver's side of transfers, one case each: what histories of the property test reach too rarely."""

import numpy as np
import pytest
from kv_peers import SMALL

from blockyard.services.kv_transfer.protocol.drops import DropReason
from blockyard.services.kv_transfer.protocol.events import BlocksLanded, Received, ReceiverEnded
from blockyard.services.kv_transfer.protocol.frames import BlockSums, BlocksWritten, Transfer, WritesAllowed
from blockyard.services.kv_transfer.protocol.incoming import IncomingTransfers

ME, SENDER, LAYERS = 8, 7, SMALL.num_layers


def incoming() -> IncomingTransfers:
    it = IncomingTransfers(SMALL, ME, 1)
    it.on_link(SENDER)
    return it


def arrive(it: IncomingTransfers, number: int, count: int) -> None:
    """All blocks of a transfer, each with the checksum 5."""
    landing = it.on_written(SENDER, BlocksWritten(number, 1, 0, count, 0, LAYERS), None)
    assert landing is not None
    it.on_landed(landing, np.full(count, 5, np.uint64))
    it.on_sums(SENDER, BlockSums(number, 1, 0, count, np.full(count, 5, "<u8").tobytes()))


def test_a_transfer_that_comes_between_two_links_waits_for_the_second() -> None:
    """A sender closes a link without transfers. Permission over no link would end the transfer at the next hello."""
    it = incoming()
    it.on_link_closed(SENDER)
    it.expect(Transfer(1, SENDER, 1, ME, 1, [4, 5]))
    assert it.take_frames() == [] and it.take_events() == []
    it.on_link(SENDER)
    assert [type(frame) for _, frame in it.take_frames()] == [WritesAllowed]
    arrive(it, 1, 2)
    landed, ended = it.take_events()
    assert landed == BlocksLanded(1, [0, 1])
    assert isinstance(ended, ReceiverEnded) and ended.outcome is Received.LANDED and it.open_transfers() == []


@pytest.mark.parametrize("sums", [b"", bytes(8), bytes(15), bytes(24)])
def test_checksums_of_a_wrong_size_are_counted_and_change_nothing(sums: bytes) -> None:
    it = incoming()
    it.expect(Transfer(1, SENDER, 1, ME, 1, [4, 5]))
    landing = it.on_written(SENDER, BlocksWritten(1, 1, 0, 2, 0, LAYERS), None)
    assert landing is not None
    it.on_landed(landing, np.full(2, 5, np.uint64))
    it.on_sums(SENDER, BlockSums(1, 1, 0, 2, sums))
    assert it.drops.by_reason == {DropReason.WRONG_SIZE: 1} and it.take_events() == []
    it.on_sums(SENDER, BlockSums(1, 1, 0, 2, np.full(2, 5, "<u8").tobytes()))
    assert it.open_transfers() == [] and len(it.take_events()) == 2


def test_a_landing_that_fails_revokes_its_transfer_once_the_sender_has_stopped() -> None:
    it = incoming()
    it.expect(Transfer(1, SENDER, 1, ME, 1, [4, 5]))
    it.take_frames()
    landing = it.on_written(SENDER, BlocksWritten(1, 1, 0, 2, 0, LAYERS), None)
    assert landing is not None
    it.on_landing_failed(landing, "test")
    assert it.on_written(SENDER, BlocksWritten(1, 1, 0, 2, 0, LAYERS), None) is None, "it ends"
    assert it.drops.by_reason == {DropReason.ENDED: 1} and it.take_events() == []
    it.on_link_lost(SENDER)
    it.on_sender_stopped(SENDER)
    (ended,) = it.take_events()
    assert isinstance(ended, ReceiverEnded) and (ended.outcome, ended.detail) == (Received.REVOKED, "test")

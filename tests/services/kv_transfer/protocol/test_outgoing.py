"""The sender's side of transfers, one case each: what histories of the property test reach too rarely."""

import pytest
from kv_peers import SMALL

from blockyard.services.kv_transfer.protocol.drops import DropReason
from blockyard.services.kv_transfer.protocol.events import Sent
from blockyard.services.kv_transfer.protocol.frames import Stopped, Transfer, WritesAllowed
from blockyard.services.kv_transfer.protocol.outgoing import OutgoingTransfers

ALL = range(SMALL.num_layers)


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("targets", [[11, 10], [10, 12], [12, 13]])
def test_blocks_in_another_order_than_reserved_are_not_copied(targets: list[int], is_early: bool) -> None:
    """Frames name them by their first position and their number: the receiver would take them for others."""
    it = OutgoingTransfers(SMALL, 1, 1 << 20)
    allowed = WritesAllowed(Transfer(1, 7, 1, 8, 1, [10, 11, 12]))
    it.begin(1, 1)
    if not is_early:
        it.on_allowed(allowed)
    it.write(1, [1, 2], targets, ALL)
    if is_early:
        it.on_allowed(allowed)
    assert it.next_write() is None
    assert [event.outcome for event in it.take_events()] == [Sent.ABORTED]
    assert it.drops.by_reason == {DropReason.CONTRADICTION: 1}
    assert [type(frame) for frame, _ in it.take_frames()] == [Stopped]

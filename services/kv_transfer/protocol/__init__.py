"""The protocol of KV transfers between two workers, in plain Python and numpy: no torch, no sockets, no connectors.

- `frames`: all frames between two workers, and `Transfer`, which both workers get from the scheduler.
- `events`: what either end reports of its transfers.
- `outgoing.OutgoingTransfers`: the sender's state of its transfers to one receiver.
- `incoming.IncomingTransfers`: the receiver's state of all transfers to it.
- `drops.Drops`: counts rejected frames by reason. `bit_masks`: sets of a transfer's positions.

The receiver decides when its blocks may be written. A sender writes blocks of a transfer only after `WritesAllowed`,
and never after the last `BlockSums` or `Stopped`. The receiver ends a transfer, which frees its blocks, only if the
sender has sent one of these two or cannot write any more (`LinkClosed`, a new `LinkHello`, the end of its process), and
if its own copies and checksums of the blocks are done. If the link has broken and both live, the receiver hears from
the scheduler that the sender has ended the transfer.
`outgoing` and `incoming` import `events`, `frames`, `drops` and `bit_masks`, and not each other.
"""

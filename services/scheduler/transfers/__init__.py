"""KV blocks that move between two worker groups: a prompt is computed in one and continued in another.

- `ledger`: `TransferLedger` alone decides when the blocks of a transfer may be given out again.
- `audit`: compares the ledger with the workers, once a minute.
- `failures`: which workers transfers fail between at present, and which blocks fail their checksums.
- `handovers`: `Handovers` reserves blocks for a sequence in another group, sends what its prefill fills, and says when
  the sequence may go on there.
- `notices`: `TransferNotices` takes workers' notices of transfers, and asks them about transfers that do not end.

Called by `lifecycle`, `planning` and `workers`. Imports `sequences`, `batch` and `queue`.
"""

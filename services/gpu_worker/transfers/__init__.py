"""Transfers of KV blocks between this worker and others, as the scheduler says.

`worker_transfers.WorkerTransfers` takes `KVReceive`, `KVAbort` and completed plans with `KVSend`, and returns the
answers for the scheduler.

- `GroupTransfers`: the transfers of all ranks of the worker. Each rank moves its part of the blocks by a
  `RankTransfers`, over a `kv_transfer.endpoint.TransferEndpoint`; `FollowerTransfers` is a follower's.
- `JoinedTransfers`: a block has landed when it has on every rank.

`mock_memory.MockMemory` has the blocks of a mock worker with transfers.

`session` and `service` call `WorkerTransfers`; without `--kv-transfer-config` or `--role` there is none. It imports
`interfaces`, `mock/` and `kv_transfer`, and with this torch.
"""

"""Transfers of KV blocks between this worker and others, as the scheduler says.

`worker_transfers.WorkerTransfers` takes `KVReceive`, `KVAbort` and completed plans with `KVSend`, and returns the
answers for the scheduler. The transfers themselves are `kv_transfer.endpoint.TransferEndpoint`'s.
`mock_memory.MockMemory` has the blocks of a mock worker with transfers.

`session` and `service` call `WorkerTransfers`; without `--kv-transfer-config` or `--role` there is none. It imports
`interfaces`, `mock/` and `kv_transfer`, and with this torch.
"""

"""Transfers of KV blocks between this worker and others, as the scheduler says.

- `worker_transfers.WorkerTransfers`: the one owner. It takes `KVReceive`, `KVAbort` and completed plans with `KVSend`,
  and returns the answers for the scheduler.
- `sender_links.SenderLinks`: a link for each worker that this one sends to. `link_counts`: sums of links' counters.

`session` and `service` call `WorkerTransfers`; without `--kv-transfer-config` or `--role` there is none. It imports
`interfaces` and `kv_transfer`, and with them torch.
"""

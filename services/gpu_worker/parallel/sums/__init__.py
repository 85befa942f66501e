"""Sums over the ranks of a stage beside NCCL, by the way that is the quickest for a size.

- `peer_sums.PeerSums`: sums by kernels over `PeerMemory`, or by torch's (`SymmetricSums`), as a table says.
- `sum_table.SumTable`: the way for each size. Pure functions of numbers.
- `sum_measurement.choose_sums`: measures the table at the first start on a machine; the leader's counts.
- `sum_cache.SumCache`: the file in which the leader keeps it for later starts.
"""

"""What a rank of several has of a model, and how ranks exchange what they have computed.

- `shares`: which heads, rows or inputs a rank has. `stages`: which layers a pipeline stage has. Pure functions.
- `expert_balance`: which experts trade places, so that ranks have about equal loads. Pure functions, too.
- `Meeting`: where ranks find each other's addresses: in a file on one host, at the leader's store on several.
- `RankGroup`: the collectives of a group of ranks: gloo between CPUs, NCCL between GPUs. `RankGroups`: those of a rank.
- `collectives`: what carries them. Ranks that share a GPU, for checks, exchange through host memory, or if there are
  two by kernels (`peer_collectives`).
- `PeerMemory`: buffers of GPUs of one host that kernels of all ranks write to (kernels/all_reduce). `sums/` sums by
  these kernels, or by torch's, where they are quicker than NCCL.
- `StageLink`: carries the rows of a step from a stage to the next.
- `ExpertExchange`: the layers of a rank whose experts are spread over replicas, and the groups in which they exchange
  rows and experts. `replicas`: how replicas agree on each step.
- `loading_slots`: bounds the ranks of a host that load at a time.

How a layer gets a rank's share: the docstring of `layers`. Each rank computes a share of every layer of its stage.
Partial sums are added by `layers.fused_ops.SummedOps`, and the leader gets the logits of all ranks of the last stage.
With one rank nothing of this is in the path of a step: `WeightTable.ranks` is None.

Imports no other package of the worker. The processes of ranks are in `ranks/`.
"""

"""Ranks that a Ray cluster starts: `--distributed-executor-backend ray`. Ray finds a node for each, and nothing else.

1. `RayRanks`: the leader's side. It starts a process that talks to Ray, so that no thread of Ray's is in the leader's,
   and exchanges `frames` with it.
2. `placement_process`: has Ray make a placement group with a bundle a rank (`BundledRanks`), on the nodes that
   `node_choice` says. The leader is rank 0, a process of its own machine: its bundle reserves what it uses.
3. `RankActor`: the process of another rank. It joins the leader as a rank of another host does (`ranks.joining`), and
   all frames between them travel there.

An actor that ends closes its links, as any rank that ends does. Ray ends actors when the process that has asked for
them ends, and that one ends with the leader.
"""

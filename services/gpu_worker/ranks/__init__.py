"""The processes of a worker with several ranks: the leader starts the others, and all end together.

- `LeaderTeam`: the leader's: starts the processes of its host before torch is imported, sends commands, and watches.
- `HostRanks`: the processes of ranks that one process of a host has started.
- `rank_process`: the process of another rank: loads its share and does what comes. `rank_start` starts it.
- `several_hosts`: how the leader waits for ranks of other hosts, and the process that starts those there. `network` has
  the interface of their collectives, and `group_digest` what all must have in common.
- `joining`: how a rank that the leader has not started finds its leader and joins: on another host, or started by Ray.
  `entrance`: where the leader takes it up, or refuses it.
- `replica_meeting`, `ReplicaTeam`: how the leaders of replicas that have the experts together find each other, agree on
  steps, and end together.
- `distant_replicas`: the same of replicas that `blockyard run` starts, on any hosts.
- `RankSigns`: signs of life, in both directions. A rank that ends, fails or is silent for 4 s ends all.

The leader is the worker process that the launcher knows. It alone is attached to a scheduler.
"""

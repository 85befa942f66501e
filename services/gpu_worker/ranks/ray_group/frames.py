"""Frames between a leader and the process that talks to Ray for it."""

from blockyard.shared.messages.base import Frame


class PlaceRanks(Frame, frozen=True):
    """Find a node for each rank, the leader's too. The answer is `RanksPlaced` or `RanksFailed`."""

    address: str  # of the cluster
    group_size: int  # ranks of a tensor-parallel group
    num_groups: int
    cpus: int  # that a rank needs; 0: it needs a GPU
    timeout_s: float
    environment: dict[str, str]  # of ranks
    with_nsight: bool  # profile those that follow the leader


class StartRanks(Frame, frozen=True):
    """Start the ranks that follow the leader. `RanksFailed` comes if one cannot be started, or fails."""

    tickets: list[bytes]  # a `RankTicket` in msgpack for each, in the order of ranks


class RanksPlaced(Frame, frozen=True):
    """Answers `PlaceRanks`."""

    addresses: list[str]  # of the nodes, by rank
    gpu: str  # CUDA's name of the leader's, or empty


class RanksFailed(Frame, frozen=True):
    """There is no room for the ranks, or one of them cannot be started or has failed."""

    detail: str
    table: list[str]  # lines: what is needed, and what is free on each node; empty: room is not what lacks
    rank: int | None  # that has failed; None: not all have been started


Request = PlaceRanks | StartRanks
Answer = RanksPlaced | RanksFailed

"""Where the experts of a layer are, if each rank has some of them whole: their ranks, and their places on this one."""

import torch
from torch import Tensor

from blockyard.services.gpu_worker.parallel.expert_balance import Trade, first_owners
from blockyard.services.gpu_worker.parallel.shares import Shard, share

NO_RANK = -1


class ExpertPlaces:
    """The map of a layer's experts. The same experts trade places in it on all ranks.

    A rank has as many places as experts at the start. What changes is written in place, so that CUDA graphs read it.
    """

    def __init__(self, num_experts: int, shard: Shard, device: torch.device, *, counts: bool) -> None:
        """counts: how often each expert is chosen."""
        self.rank = shard.rank
        self.owners = first_owners(num_experts, shard.size)  # rank of each expert
        self._places = [i - self.owners.index(owner) for i, owner in enumerate(self.owners)]  # of each on its rank
        self.first = share(num_experts, shard)  # experts of this rank before any trade
        self.num_own = len(self.first)
        self.elsewhere = self.num_own  # the place of other ranks' experts
        self.counts = counts
        # the place of each expert, and its rank; and one more: rows of padding have the expert -1
        self.table = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
        self.owner_table = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
        self._counts = torch.empty(num_experts + 1 if counts else 0, dtype=torch.int64, device=device)
        self._one = torch.empty(1, dtype=torch.int64, device=device)
        if not self.table.is_meta:
            self.install()
            self._one.fill_(1)
            self._counts.zero_()

    @property
    def loads(self) -> Tensor:
        """How often rows of this rank have chosen each expert, [experts] int64. Whoever reads it sets it back to 0."""
        return self._counts[:-1]

    def own_loads(self) -> Tensor:
        """`loads` of the experts of this rank, which sees all rows of these, and 0 for others."""
        return self.loads * (self.owner_table[:-1] == self.rank)

    def find(self, experts: Tensor) -> Tensor:
        """experts [rows, top_k] of all ranks, -1 for none -> int32, their places on this rank, or `elsewhere`."""
        flat = experts.flatten().remainder(len(self.table))
        if len(self._counts):
            self._counts.index_add_(0, flat, self._one.expand(len(flat)))
        return self.table.index_select(0, flat).view_as(experts)

    def place_of(self, expert: int) -> int:
        return self._places[expert]

    def trade(self, pair: Trade) -> None:
        """Two experts take each other's rank and place. Steps look there once `install` is called."""
        one, other = pair
        for some in (self.owners, self._places):
            some[one], some[other] = some[other], some[one]

    def install(self) -> None:
        """Writes where experts are now, for the next step."""
        both = zip(self.owners, self._places, strict=True)
        here = [place if owner == self.rank else self.elsewhere for owner, place in both]
        self.table.copy_(torch.tensor([*here, self.elsewhere], dtype=torch.int32))
        self.owner_table.copy_(torch.tensor([*self.owners, NO_RANK], dtype=torch.int32))

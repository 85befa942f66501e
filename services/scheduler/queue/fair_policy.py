"""FairPolicy sharing: tenants take turns by the tokens they were served, and the users of a tenant by theirs.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): a counter of weighted tokens each, the
lowest is next. Who comes back after having nothing to wait for starts at the lowest counter of those who wait, so that
nobody saves up. Beyond the paper, tenants are divided into users, and seats are ranked: the n-th choice that a tenant
has running is of class n, so that whoever has fewer running may take the place of whoever has more.
"""

import heapq
from typing import Generic, TypeVar

from blockyard.services.scheduler.queue.policy import SequenceHeap
from blockyard.services.scheduler.sequences.requests import Key, Sequence
from blockyard.shared.messages import TenantShare

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2  # of a token, as in the paper
RECENT_S = 60.0  # who asked within it may ask again
MIN_KEPT = 256  # names that are kept without a look at who has gone


class FairShare:
    """A tenant, or a user of one: what it was served, and how many of its choices are here."""

    __slots__ = ("in_heap", "name", "num_running", "num_waiting", "served")

    def __init__(self, name: str) -> None:
        self.name = name
        self.served = 0  # weighted tokens; rises only
        self.num_running = self.num_waiting = 0
        self.in_heap = False  # in its division's heap

    @property
    def is_active(self) -> bool:
        return self.num_running + self.num_waiting > 0


T = TypeVar("T", bound=FairShare)


class ShareGroup(Generic[T]):
    """Shares of one whole: the tenants, or the users of a tenant."""

    def __init__(self) -> None:
        self.shares: dict[str, T] = {}
        self.num_active = 0
        self._heap: list[tuple[int, int, str, T]] = []  # who waits, by what it had been served when last looked at
        self._last: T | None = None  # who was seated last
        self._look_at = MIN_KEPT

    def add(self, share: T) -> T:
        if len(self.shares) >= self._look_at:
            self._forget()
        self.shares[share.name] = share
        return share

    def lowest(self) -> T | None:
        """Of those that wait the one that was served least; of those, one that has few running."""
        heap = self._heap
        while heap:
            known, _, _, share = heap[0]
            if not share.num_waiting:
                heapq.heappop(heap)
                share.in_heap = False
            elif share.served > known:
                heapq.heapreplace(heap, (share.served, share.num_running, share.name, share))
            else:
                return share
        return None

    def count(self, share: T, waiting: int, running: int) -> None:
        """So many choices of a share's more, or less, wait and run."""
        if waiting > 0 and not share.num_waiting:
            self._join(share)
        before = share.is_active
        share.num_waiting += waiting
        share.num_running += running
        self.num_active += share.is_active - before

    def on_scheduled(self, share: T, num_tokens: int) -> None:
        self._last = share
        share.served += num_tokens * PROMPT_WEIGHT

    def _join(self, share: T) -> None:
        lowest = self.lowest() or self._last
        if lowest is not None:
            share.served = max(share.served, lowest.served)
        if not share.in_heap:
            share.in_heap = True
            heapq.heappush(self._heap, (share.served, share.num_running, share.name, share))

    def _forget(self) -> None:
        """Whoever is not here, and would start no lower if it were new."""
        lowest = self.lowest() or self._last
        floor = 0 if lowest is None else lowest.served
        self.shares = {n: s for n, s in self.shares.items() if s.is_active or s.in_heap or s.served > floor}
        self._look_at = max(MIN_KEPT, 2 * len(self.shares))


class User(FairShare):
    __slots__ = ("queue", "tenant")

    def __init__(self, name: str, tenant: "Tenant") -> None:
        super().__init__(name)
        self.tenant = tenant
        self.queue = SequenceHeap()

    def charge(self, num_outputs: int) -> None:
        """For tokens that were generated."""
        weighted = num_outputs * OUTPUT_WEIGHT
        self.served += weighted
        self.tenant.served += weighted


class Tenant(FairShare):
    __slots__ = ("users",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.users: ShareGroup[User] = ShareGroup()


class FairPolicy:
    def __init__(self) -> None:
        self.tenants: ShareGroup[Tenant] = ShareGroup()
        self._recent: dict[str, float] = {}  # tenants by when they asked last, in that order
        self._now = 0.0

    def push(self, sequence: Sequence) -> None:
        user = self._user(sequence)
        sequence.request.set_account(user)
        self._note_arrival(user.tenant.name, sequence.request.arrival_s)
        self._count(user, 1, 0)
        user.queue.push((0, sequence.request.arrival, sequence.index), sequence)

    def peek(self) -> Sequence | None:
        tenant = self.tenants.lowest()
        user = tenant.users.lowest() if tenant is not None else None
        return user.queue.peek() if user is not None else None

    def remove(self, sequence: Sequence) -> None:
        user = self._user(sequence)
        self._count(user, -1, 0)
        user.queue.remove()

    def key(self, sequence: Sequence) -> Key:
        """The class is the choice's place among its tenant's running ones, if their users took turns."""
        user = self._user(sequence)
        tenant = user.tenant
        place = min(tenant.num_running + 1, (user.num_running + 1) * max(1, tenant.users.num_active))
        return (place, sequence.request.arrival, sequence.index)

    def preemptible_by(self, seated: Sequence, rank: int) -> bool:
        """Of n that a tenant has running none is above class n: it was when it was seated, and others have left."""
        return min(seated.key[0], self._user(seated).tenant.num_running) > rank

    def over_share(self, sequence: Sequence, num_seats: int) -> bool:
        """His share of them if one tenant more were here."""
        tenant, num_tenants = self._user(sequence).tenant, self.tenants.num_active
        return len(self._recent) > 1 and (tenant.num_running + tenant.num_waiting) * (num_tenants + 1) > num_seats

    def on_scheduled(self, sequence: Sequence, num_tokens: int) -> None:
        user = self._user(sequence)
        self._count(user, 0, 1)
        self.tenants.on_scheduled(user.tenant, num_tokens)
        user.tenant.users.on_scheduled(user, num_tokens)

    def on_freed(self, sequence: Sequence) -> None:
        self._count(self._user(sequence), 0, -1)

    def largest_tenants(self, most: int) -> list[TenantShare]:
        """The tenants that were served most."""
        tenants = heapq.nlargest(most, self.tenants.shares.values(), key=lambda tenant: tenant.served)
        return [TenantShare(t.name, t.num_running, t.num_waiting, t.served) for t in tenants]

    def _note_arrival(self, name: str, now: float) -> None:
        """Who waits again after a preemption is here now, whenever it came."""
        lately = self._recent
        now = self._now = max(now, self._now)
        lately.pop(name, None)
        lately[name] = now
        while lately[first := next(iter(lately))] < now - RECENT_S:
            del lately[first]

    def _user(self, sequence: Sequence) -> User:
        account = sequence.request.account
        if isinstance(account, User):
            return account
        tenant_name, user_name = sequence.request.owner
        tenant = self.tenants.shares.get(tenant_name) or self.tenants.add(Tenant(tenant_name))
        return tenant.users.shares.get(user_name) or tenant.users.add(User(user_name, tenant))

    def _count(self, user: User, waiting: int, running: int) -> None:
        user.tenant.users.count(user, waiting, running)
        self.tenants.count(user.tenant, waiting, running)

"""The fair policy: tenants share a scheduler by the tokens they were served, and the users of a tenant likewise.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): each tenant has a counter of weighted
tokens, and the tenant with the lowest counter is next. A tenant that returns after a time without waiting sequences
starts at the lowest counter of the waiting tenants, so that nothing is saved up.

Beyond the paper, tenants are divided into users, and running sequences are ranked: the n-th running sequence of a
tenant has class n, so that a tenant with few running sequences may preempt one with many.
"""

import heapq
from typing import Generic, TypeVar

from blockyard.services.scheduler.queue.policy import SequenceHeap
from blockyard.services.scheduler.sequences.requests import Key, Sequence
from blockyard.shared.messages import TenantShare

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2  # of a token, as in the paper
RECENT_S = 60.0  # a tenant that asked within this time may ask again
TURN_TOKENS = 512  # of texts of one request, before another tenant may be next
MIN_KEPT = 256  # shares to keep before inactive ones are dropped


class FairShare:
    """A tenant, or a user of a tenant: the tokens it was served and its waiting and running sequences."""

    __slots__ = ("name", "num_running", "num_waiting", "served")

    def __init__(self, name: str) -> None:
        self.name = name
        self.served = 0  # weighted tokens; never falls
        self.num_running = self.num_waiting = 0

    @property
    def is_active(self) -> bool:
        return self.num_running + self.num_waiting > 0

    def count(self, waiting: int, running: int) -> None:
        self.num_waiting += waiting
        self.num_running += running

    def serve(self, weighted_tokens: int) -> None:
        self.served += weighted_tokens

    def raise_to(self, served: int) -> None:
        self.served = max(self.served, served)


T = TypeVar("T", bound=FairShare)


class ShareGroup(Generic[T]):
    """Shares of one whole: all tenants, or the users of one tenant."""

    def __init__(self) -> None:
        self.shares: dict[str, T] = {}
        self.num_active = 0
        self._heap: list[tuple[int, int, str, T]] = []  # shares with waiting sequences, by an earlier `served`
        self._in_heap: set[str] = set()
        self._last: T | None = None  # the share that was scheduled last
        self._num_kept = MIN_KEPT

    def add(self, share: T) -> T:
        if len(self.shares) >= self._num_kept:
            self._drop_inactive()
        self.shares[share.name] = share
        return share

    def lowest(self) -> T | None:
        """The waiting share that was served least; among equals one with few running sequences."""
        heap = self._heap
        while heap:
            served, _, name, share = heap[0]
            if not share.num_waiting:
                heapq.heappop(heap)
                self._in_heap.discard(name)
            elif share.served > served:
                heapq.heapreplace(heap, (share.served, share.num_running, name, share))
            else:
                return share
        return None

    def count(self, share: T, waiting: int, running: int) -> None:
        """Adds to a share's numbers of waiting and running sequences; either may be negative."""
        if waiting > 0 and not share.num_waiting:
            self._start_waiting(share)
        before = share.is_active
        share.count(waiting, running)
        self.num_active += share.is_active - before

    def on_scheduled(self, share: T, num_tokens: int) -> None:
        self._last = share
        share.serve(num_tokens * PROMPT_WEIGHT)

    def _start_waiting(self, share: T) -> None:
        lowest = self.lowest() or self._last
        if lowest is not None:
            share.raise_to(lowest.served)
        if share.name not in self._in_heap:
            self._in_heap.add(share.name)
            heapq.heappush(self._heap, (share.served, share.num_running, share.name, share))

    def _drop_inactive(self) -> None:
        """Drops inactive shares that would start with the same count if they were new."""
        lowest = self.lowest() or self._last
        floor = 0 if lowest is None else lowest.served
        self.shares = {n: s for n, s in self.shares.items() if s.is_active or n in self._in_heap or s.served > floor}
        self._num_kept = max(MIN_KEPT, 2 * len(self.shares))


class User(FairShare):
    __slots__ = ("queue", "tenant")

    def __init__(self, name: str, tenant: "Tenant") -> None:
        super().__init__(name)
        self.tenant = tenant
        self.queue = SequenceHeap()

    def charge(self, num_outputs: int) -> None:
        """Counts generated tokens."""
        weighted = num_outputs * OUTPUT_WEIGHT
        self.served += weighted
        self.tenant.serve(weighted)


class Tenant(FairShare):
    __slots__ = ("users",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.users: ShareGroup[User] = ShareGroup()


class FairPolicy:
    """Implements `Policy`."""

    has_classes = True
    turn_tokens = TURN_TOKENS

    def __init__(self) -> None:
        self.tenants: ShareGroup[Tenant] = ShareGroup()
        self._recent: dict[str, float] = {}  # last arrival by tenant, oldest first
        self._now = 0.0

    def push(self, sequence: Sequence) -> None:
        user = self._user(sequence)
        sequence.request.account = user
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
        """The class is the sequence's rank among its tenant's running ones, if the tenant's users took turns."""
        user = self._user(sequence)
        tenant = user.tenant
        rank = min(tenant.num_running + 1, (user.num_running + 1) * max(1, tenant.users.num_active))
        return (rank, sequence.request.arrival, sequence.index)

    def preemptible_by(self, running: Sequence, rank: int) -> bool:
        """A tenant with n running sequences has none above class n, though it may have had more when one started."""
        return min(running.key[0], self._user(running).tenant.num_running) > rank

    def over_share(self, sequence: Sequence, num_slots: int) -> bool:
        """The share of a tenant is what it would get with one more active tenant."""
        tenant, num_tenants = self._user(sequence).tenant, self.tenants.num_active
        return len(self._recent) > 1 and (tenant.num_running + tenant.num_waiting) * (num_tenants + 1) > num_slots

    def on_scheduled(self, sequence: Sequence, num_tokens: int) -> None:
        user = self._user(sequence)
        self._count(user, 0, 1)
        self.tenants.on_scheduled(user.tenant, num_tokens)
        user.tenant.users.on_scheduled(user, num_tokens)

    def on_freed(self, sequence: Sequence) -> None:
        self._count(self._user(sequence), 0, -1)

    def largest_tenants(self, most: int) -> list[TenantShare]:
        tenants = heapq.nlargest(most, self.tenants.shares.values(), key=lambda tenant: tenant.served)
        return [TenantShare(t.name, t.num_running, t.num_waiting, t.served) for t in tenants]

    def _note_arrival(self, name: str, now: float) -> None:
        """`now` may be old, for a sequence that waits again after a preemption: time does not go back."""
        recent = self._recent
        now = self._now = max(now, self._now)
        recent.pop(name, None)
        recent[name] = now
        while recent[first := next(iter(recent))] < now - RECENT_S:
            del recent[first]

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

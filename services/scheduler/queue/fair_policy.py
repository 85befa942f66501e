"""Fair sharing: tenants take turns by the tokens they were served, and the users of a tenant by theirs.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): a counter of weighted tokens each, the
lowest is next. Who comes back after having nothing to wait for starts at the lowest counter of those who wait, so that
nobody saves up. Beyond the paper, tenants are divided into users, and seats are ranked: the n-th choice that a tenant
has running is of class n, so that whoever has fewer running may take the place of whoever has more.
"""

import heapq
from typing import Generic, TypeVar

from blockyard.services.scheduler.queue.policy import KeyQueue
from blockyard.services.scheduler.sequences.requests import Choice, Key
from blockyard.shared.messages import TenantShare

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2  # of a token, as in the paper
LATELY_S = 60.0  # who asked within it may ask again
KEEP = 256  # names that are kept without a look at who has gone


class Share:
    """A tenant, or a user of one: what it was served, and how many of its choices are here."""

    __slots__ = ("listed", "name", "num_running", "num_waiting", "served")

    def __init__(self, name: str) -> None:
        self.name = name
        self.served = 0  # weighted tokens; rises only
        self.num_running = self.num_waiting = 0
        self.listed = False  # in its division's heap

    @property
    def is_here(self) -> bool:
        return self.num_running + self.num_waiting > 0


T = TypeVar("T", bound=Share)


class Division(Generic[T]):
    """Shares of one whole: the tenants, or the users of a tenant."""

    def __init__(self) -> None:
        self.shares: dict[str, T] = {}
        self.num_here = 0
        self._turns: list[tuple[int, int, str, T]] = []  # who waits, by what it had been served when last looked at
        self._last: T | None = None  # who was seated last
        self._look_at = KEEP

    def add(self, share: T) -> T:
        if len(self.shares) >= self._look_at:
            self._forget()
        self.shares[share.name] = share
        return share

    def next(self) -> T | None:
        """Of those that wait the one that was served least; of those, one that has few running."""
        turns = self._turns
        while turns:
            known, _, _, share = turns[0]
            if not share.num_waiting:
                heapq.heappop(turns)
                share.listed = False
            elif share.served > known:
                heapq.heapreplace(turns, (share.served, share.num_running, share.name, share))
            else:
                return share
        return None

    def count(self, share: T, waiting: int, running: int) -> None:
        """So many choices of a share's more, or less, wait and run."""
        if waiting > 0 and not share.num_waiting:
            self._join(share)
        before = share.is_here
        share.num_waiting += waiting
        share.num_running += running
        self.num_here += share.is_here - before

    def seated(self, share: T, num_tokens: int) -> None:
        self._last = share
        share.served += num_tokens * PROMPT_WEIGHT

    def _join(self, share: T) -> None:
        lowest = self.next() or self._last
        if lowest is not None:
            share.served = max(share.served, lowest.served)
        if not share.listed:
            share.listed = True
            heapq.heappush(self._turns, (share.served, share.num_running, share.name, share))

    def _forget(self) -> None:
        """Whoever is not here, and would start no lower if it were new."""
        lowest = self.next() or self._last
        floor = 0 if lowest is None else lowest.served
        self.shares = {n: s for n, s in self.shares.items() if s.is_here or s.listed or s.served > floor}
        self._look_at = max(KEEP, 2 * len(self.shares))


class User(Share):
    __slots__ = ("queue", "tenant")

    def __init__(self, name: str, tenant: "Tenant") -> None:
        super().__init__(name)
        self.tenant = tenant
        self.queue = KeyQueue()

    def charge(self, num_outputs: int) -> None:
        """For tokens that were generated."""
        weighted = num_outputs * OUTPUT_WEIGHT
        self.served += weighted
        self.tenant.served += weighted


class Tenant(Share):
    __slots__ = ("users",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.users: Division[User] = Division()


class Fair:
    def __init__(self) -> None:
        self.tenants: Division[Tenant] = Division()
        self._lately: dict[str, float] = {}  # tenants by when they asked last, in that order
        self._now = 0.0

    def push(self, choice: Choice) -> None:
        user = self._user(choice)
        choice.request.payer = user
        self._asked(user.tenant.name, choice.request.came_s)
        self._count(user, 1, 0)
        user.queue.push((0, choice.request.arrival, choice.index), choice)

    def peek(self) -> Choice | None:
        tenant = self.tenants.next()
        user = tenant.users.next() if tenant is not None else None
        return user.queue.peek() if user is not None else None

    def left(self, choice: Choice) -> None:
        user = self._user(choice)
        self._count(user, -1, 0)
        user.queue.left()

    def key(self, choice: Choice) -> Key:
        """The class is the choice's place among its tenant's running ones, if their users took turns."""
        user = self._user(choice)
        tenant = user.tenant
        place = min(tenant.num_running + 1, (user.num_running + 1) * max(1, tenant.users.num_here))
        return (place, choice.request.arrival, choice.index)

    def yields(self, seated: Choice, rank: int) -> bool:
        """Of n that a tenant has running none is above class n: it was when it was seated, and others have left."""
        return min(seated.key[0], self._user(seated).tenant.num_running) > rank

    def is_over(self, choice: Choice, num_seats: int) -> bool:
        """His share of them if one tenant more were here."""
        tenant, num_tenants = self._user(choice).tenant, self.tenants.num_here
        return len(self._lately) > 1 and (tenant.num_running + tenant.num_waiting) * (num_tenants + 1) > num_seats

    def seated(self, choice: Choice, num_tokens: int) -> None:
        user = self._user(choice)
        self._count(user, 0, 1)
        self.tenants.seated(user.tenant, num_tokens)
        user.tenant.users.seated(user, num_tokens)

    def vacated(self, choice: Choice) -> None:
        self._count(self._user(choice), 0, -1)

    def largest(self, most: int) -> list[TenantShare]:
        """The tenants that were served most."""
        tenants = heapq.nlargest(most, self.tenants.shares.values(), key=lambda tenant: tenant.served)
        return [TenantShare(t.name, t.num_running, t.num_waiting, t.served) for t in tenants]

    def _asked(self, name: str, now: float) -> None:
        """Who waits again after a preemption is here now, whenever it came."""
        lately = self._lately
        now = self._now = max(now, self._now)
        lately.pop(name, None)
        lately[name] = now
        while lately[first := next(iter(lately))] < now - LATELY_S:
            del lately[first]

    def _user(self, choice: Choice) -> User:
        payer = choice.request.payer
        if isinstance(payer, User):
            return payer
        tenant_name, user_name = choice.request.owner
        tenant = self.tenants.shares.get(tenant_name) or self.tenants.add(Tenant(tenant_name))
        return tenant.users.shares.get(user_name) or tenant.users.add(User(user_name, tenant))

    def _count(self, user: User, waiting: int, running: int) -> None:
        user.tenant.users.count(user, waiting, running)
        self.tenants.count(user.tenant, waiting, running)

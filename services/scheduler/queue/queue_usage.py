"""Whose choices wait: who gives way when the queue is full."""

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import islice

from blockyard.services.scheduler.sequences.requests import NO_AMOUNT, QueueAmount, Request

Owner = tuple[str, str]  # tenant, and user of it


ShareOf = Callable[
    [QueueAmount], tuple[float, int]
]  # how much of the queue that is; of equals the larger second counts


class UserUsage:
    """What one user of a tenant has waiting."""

    __slots__ = ("amount", "newcomers")

    def __init__(self) -> None:
        self.amount = NO_AMOUNT
        self.newcomers: dict[str, Request] = {}  # those that nothing was promised to, by arrival


class QueueUsage:
    def __init__(self) -> None:
        self.amount = NO_AMOUNT  # of all
        self._users: dict[Owner, UserUsage] = {}

    def add(self, owner: Owner, amount: QueueAmount) -> None:
        """So much more of an owner waits, or less where it is negative."""
        usage = self._users.get(owner)
        if usage is None:
            usage = self._users[owner] = UserUsage()
        self.amount = self.amount.plus(amount)
        usage.amount = usage.amount.plus(amount)
        if not usage.amount.sequences:
            del self._users[owner]

    def on_newcomer(self, request: Request) -> None:
        """After `add`: it may have to give way."""
        self._users[request.owner].newcomers[request.id] = request

    def remove_newcomer(self, request: Request) -> None:
        """Before the last of it is taken off: it was promised to be served, or has gone."""
        usage = self._users.get(request.owner)
        if usage is not None:
            usage.newcomers.pop(request.id, None)

    def largest_user(self, share: ShareOf) -> Owner | None:
        """Whose newest request would give way; None if nobody's can."""
        owner = self._largest_user({}, share)
        return owner if owner is not None and self._users[owner].newcomers else None

    def evict_for(
        self, owner: Owner, amount: QueueAmount, lacks: Callable[[QueueAmount], bool], share: ShareOf
    ) -> list[Request] | None:
        """Requests that have to go so that a newcomer of `owner` with so much may come; None: it is the one to go.

        `lacks` says whether there is no room yet when so much is gone.
        """
        freed: dict[Owner, QueueAmount] = {owner: NO_AMOUNT.less(amount)}
        num_gone: Counter[Owner] = Counter()
        gone, gone_amount = list[Request](), NO_AMOUNT
        while lacks(gone_amount):
            largest_user = self._largest_user(freed, share, first=owner)
            if largest_user is None or largest_user == owner:
                return None
            newcomers = reversed(self._users[largest_user].newcomers.values())
            request = next(islice(newcomers, num_gone[largest_user], None), None)
            if request is None:
                return None
            num_gone[largest_user] += 1
            waiting = [sequence.queue_amount for sequence in request.active_sequences]
            of_it = QueueAmount(sum(one.sequences for one in waiting), sum(one.tokens for one in waiting))
            freed[largest_user] = freed.get(largest_user, NO_AMOUNT).plus(of_it)
            gone_amount = gone_amount.plus(of_it)
            gone.append(request)
        return gone

    def _largest_user(
        self, freed: dict[Owner, QueueAmount], share: ShareOf, first: Owner | None = None
    ) -> Owner | None:
        """The user with the largest share of the tenant with the largest, less what is freed; `first` of equals."""
        users = {owner: usage.amount for owner, usage in self._users.items()}
        for owner, amount in freed.items():
            users[owner] = users.get(owner, NO_AMOUNT).less(amount)
        if not self._users:
            return None
        tenants: defaultdict[str, QueueAmount] = defaultdict(QueueAmount)
        for (tenant, _), amount in users.items():
            tenants[tenant] = tenants[tenant].plus(amount)
        largest_user = max(tenants, key=lambda t: (share(tenants[t]), first is not None and t == first[0]))
        return max((o for o in users if o[0] == largest_user), key=lambda o: (share(users[o]), o == first))

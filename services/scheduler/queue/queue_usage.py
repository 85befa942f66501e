"""Counts each tenant's and user's part of the waiting queue, and chooses the request that a full queue refuses."""

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import islice

from blockyard.services.scheduler.sequences.requests import NO_AMOUNT, QueueAmount, Request

Owner = tuple[str, str]  # tenant, and user of the tenant
ShareOf = Callable[[QueueAmount], tuple[float, int]]  # share of the queue, and a second number to order equal shares


class UserUsage:
    """One user's part of the queue."""

    __slots__ = ("amount", "unaccepted")

    def __init__(self) -> None:
        self.amount = NO_AMOUNT
        self.unaccepted: dict[str, Request] = {}  # requests that are not accepted yet, oldest first

    def add(self, amount: QueueAmount) -> None:
        self.amount = self.amount.plus(amount)


class QueueUsage:
    def __init__(self) -> None:
        self.amount = NO_AMOUNT  # of all users
        self._users: dict[Owner, UserUsage] = {}

    def add(self, owner: Owner, amount: QueueAmount) -> None:
        """Adds an amount, which may be negative, to what an owner has in the queue."""
        usage = self._users.get(owner)
        if usage is None:
            usage = self._users[owner] = UserUsage()
        self.amount = self.amount.plus(amount)
        usage.add(amount)
        if not usage.amount.sequences:
            del self._users[owner]

    def add_unaccepted(self, request: Request) -> None:
        """The request may be refused to make room. To be called after `add`."""
        self._users[request.owner].unaccepted[request.id] = request

    def remove_unaccepted(self, request: Request) -> None:
        """The request was accepted or has ended. To be called before its last amount is taken off."""
        usage = self._users.get(request.owner)
        if usage is not None:
            usage.unaccepted.pop(request.id, None)

    def largest_user(self, share: ShareOf) -> Owner | None:
        """The user whose newest request would be refused to make room; None if all of its requests are accepted."""
        owner = self._largest_user({}, share)
        return owner if owner is not None and self._users[owner].unaccepted else None

    def evict_for(
        self, owner: Owner, amount: QueueAmount, lacks: Callable[[QueueAmount], bool], share: ShareOf
    ) -> list[Request] | None:
        """Requests to refuse so that a new request of `owner` with `amount` fits; None to refuse the new request.

        `lacks(freed)`: whether the new request still does not fit once `freed` is taken off the queue.
        """
        freed: dict[Owner, QueueAmount] = {owner: NO_AMOUNT.less(amount)}
        num_refused: Counter[Owner] = Counter()
        refused, refused_amount = list[Request](), NO_AMOUNT
        while lacks(refused_amount):
            largest_user = self._largest_user(freed, share, preferred=owner)
            if largest_user is None or largest_user == owner:
                return None
            unaccepted = reversed(self._users[largest_user].unaccepted.values())
            request = next(islice(unaccepted, num_refused[largest_user], None), None)
            if request is None:
                return None
            num_refused[largest_user] += 1
            waiting = [sequence.queue_amount for sequence in request.active_sequences]
            amount_of_request = QueueAmount(sum(one.sequences for one in waiting), sum(one.tokens for one in waiting))
            freed[largest_user] = freed.get(largest_user, NO_AMOUNT).plus(amount_of_request)
            refused_amount = refused_amount.plus(amount_of_request)
            refused.append(request)
        return refused

    def _largest_user(
        self, freed: dict[Owner, QueueAmount], share: ShareOf, preferred: Owner | None = None
    ) -> Owner | None:
        """The user with the largest share within the tenant with the largest share, not counting `freed`.

        Among equals it is `preferred`.
        """
        users = {owner: usage.amount for owner, usage in self._users.items()}
        for owner, amount in freed.items():
            users[owner] = users.get(owner, NO_AMOUNT).less(amount)
        if not self._users:
            return None
        tenants: defaultdict[str, QueueAmount] = defaultdict(QueueAmount)
        for (tenant, _), amount in users.items():
            tenants[tenant] = tenants[tenant].plus(amount)
        largest_user = max(tenants, key=lambda t: (share(tenants[t]), preferred is not None and t == preferred[0]))
        return max((o for o in users if o[0] == largest_user), key=lambda o: (share(users[o]), o == preferred))

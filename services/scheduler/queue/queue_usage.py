"""Whose choices wait: who gives way when the queue is full."""

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import islice

from blockyard.services.scheduler.sequences.requests import NONE, Amount, Request

Owner = tuple[str, str]  # tenant, and user of it


Share = Callable[[Amount], tuple[float, int]]  # how much of the queue that is; of equals the larger second counts


class Line:
    """What one user of a tenant has waiting."""

    __slots__ = ("amount", "newcomers")

    def __init__(self) -> None:
        self.amount = NONE
        self.newcomers: dict[str, Request] = {}  # those that nothing was promised to, by arrival


class Ledger:
    def __init__(self) -> None:
        self.amount = NONE  # of all
        self._lines: dict[Owner, Line] = {}

    def add(self, owner: Owner, amount: Amount) -> None:
        """So much more of an owner waits, or less where it is negative."""
        line = self._lines.get(owner)
        if line is None:
            line = self._lines[owner] = Line()
        self.amount = self.amount.plus(amount)
        line.amount = line.amount.plus(amount)
        if not line.amount.choices:
            del self._lines[owner]

    def came(self, request: Request) -> None:
        """After `add`: it may have to give way."""
        self._lines[request.owner].newcomers[request.id] = request

    def settled(self, request: Request) -> None:
        """Before the last of it is taken off: it was promised to be served, or has gone."""
        line = self._lines.get(request.owner)
        if line is not None:
            line.newcomers.pop(request.id, None)

    def heaviest(self, share: Share) -> Owner | None:
        """Whose newest request would give way; None if nobody's can."""
        owner = self._heaviest({}, share)
        return owner if owner is not None and self._lines[owner].newcomers else None

    def give_way(
        self, owner: Owner, amount: Amount, lacks: Callable[[Amount], bool], share: Share
    ) -> list[Request] | None:
        """Requests that have to go so that a newcomer of `owner` with so much may come; None: it is the one to go.

        `lacks` says whether there is no room yet when so much is gone.
        """
        freed: dict[Owner, Amount] = {owner: NONE.less(amount)}
        num_gone: Counter[Owner] = Counter()
        gone, gone_amount = list[Request](), NONE
        while lacks(gone_amount):
            heaviest = self._heaviest(freed, share, first=owner)
            if heaviest is None or heaviest == owner:
                return None
            newcomers = reversed(self._lines[heaviest].newcomers.values())
            request = next(islice(newcomers, num_gone[heaviest], None), None)
            if request is None:
                return None
            num_gone[heaviest] += 1
            waiting = [choice.counted for choice in request.members]
            of_it = Amount(sum(one.choices for one in waiting), sum(one.tokens for one in waiting))
            freed[heaviest] = freed.get(heaviest, NONE).plus(of_it)
            gone_amount = gone_amount.plus(of_it)
            gone.append(request)
        return gone

    def _heaviest(self, freed: dict[Owner, Amount], share: Share, first: Owner | None = None) -> Owner | None:
        """The user with the largest share of the tenant with the largest, less what is freed; `first` of equals."""
        users = {owner: line.amount for owner, line in self._lines.items()}
        for owner, amount in freed.items():
            users[owner] = users.get(owner, NONE).less(amount)
        if not self._lines:
            return None
        tenants: defaultdict[str, Amount] = defaultdict(Amount)
        for (tenant, _), amount in users.items():
            tenants[tenant] = tenants[tenant].plus(amount)
        heaviest = max(tenants, key=lambda t: (share(tenants[t]), first is not None and t == first[0]))
        return max((o for o in users if o[0] == heaviest), key=lambda o: (share(users[o]), o == first))

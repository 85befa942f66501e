"""Whose tokens wait: who gives way when the queue is full."""

from collections import Counter
from collections.abc import Callable
from itertools import islice

from blockyard.services.scheduler.requests import Request

Owner = tuple[str, str]  # tenant, and user of it


class Line:
    """What one user of a tenant has waiting."""

    __slots__ = ("newcomers", "num_tokens")

    def __init__(self) -> None:
        self.num_tokens = 0
        self.newcomers: dict[str, Request] = {}  # those that nothing was promised to, by arrival


class Ledger:
    def __init__(self) -> None:
        self.num_tokens = 0
        self._lines: dict[Owner, Line] = {}
        self._tenants: Counter[str] = Counter()  # tokens

    def add(self, request: Request, num_tokens: int) -> None:
        """So many tokens of a request wait, or fewer do where it is negative."""
        owner = request.owner
        line = self._lines.get(owner)
        if line is None:
            line = self._lines[owner] = Line()
        self.num_tokens += num_tokens
        self._tenants[owner[0]] += num_tokens
        line.num_tokens += num_tokens
        if not line.num_tokens:
            del self._lines[owner]
            if not self._tenants[owner[0]]:
                del self._tenants[owner[0]]

    def came(self, request: Request) -> None:
        """After `add`: it may have to give way."""
        self._lines[request.owner].newcomers[request.id] = request

    def settled(self, request: Request) -> None:
        """Before the last of it is taken off: it was promised to be served, or has gone."""
        line = self._lines.get(request.owner)
        if line is not None:
            line.newcomers.pop(request.id, None)

    def heaviest(self) -> Owner | None:
        """Whose newest request would give way; None if nobody's can."""
        owner = self._heaviest(Counter())
        return owner if owner is not None and self._lines[owner].newcomers else None

    def give_way(self, owner: Owner, num_tokens: int, lacks: Callable[[int, int], bool]) -> list[Request] | None:
        """Whoever has to go so that a newcomer of `owner` with so many tokens may come; None: it is the one to go.

        `lacks` says whether there is no room yet when so many requests and tokens are gone.
        """
        freed: Counter[Owner] = Counter({owner: -num_tokens})
        num_gone: Counter[Owner] = Counter()
        gone: list[Request] = []
        while lacks(len(gone), freed.total() + num_tokens):
            heaviest = self._heaviest(freed, first=owner)
            if heaviest is None or heaviest == owner:
                return None
            newcomers = reversed(self._lines[heaviest].newcomers.values())
            request = next(islice(newcomers, num_gone[heaviest], None), None)
            if request is None:
                return None
            num_gone[heaviest] += 1
            freed[heaviest] += sum(choice.known for choice in request.choices.values() if choice.ticket)
            gone.append(request)
        return gone

    def _heaviest(self, freed: Counter[Owner], first: Owner | None = None) -> Owner | None:
        """The user with most tokens of the tenant with most, less what is freed. `first` is taken of equals."""
        tenants, users = self._tenants.copy(), {owner: line.num_tokens for owner, line in self._lines.items()}
        for owner, num_tokens in freed.items():
            tenants[owner[0]] -= num_tokens
            users[owner] = users.get(owner, 0) - num_tokens
        if not tenants:
            return None
        tenant = max(tenants, key=lambda t: (tenants[t], first is not None and t == first[0]))
        return max((o for o in users if o[0] == tenant), key=lambda o: (users[o], o == first))

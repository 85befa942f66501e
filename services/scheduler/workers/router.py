"""Which group a waiting choice goes to: where the least is to be computed for it, and before it.

With one group there is nothing to decide, and whoever is next is taken straight from the waiting queue. With several,
each turn begins with `place`: whoever is next goes to a group's desk, as long as there is one with room, and takes its
seat with that group's next plan. Desks are short, a step's worth of tokens: what has not been placed yet can still go
wherever there is room first. Who begins as others do stands longer, where that beginning is computed.
"""

from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter

from blockyard.services.scheduler.kv_cache.prefix_cache import Found, PrefixCache
from blockyard.services.scheduler.queue.acceptance import Promises
from blockyard.services.scheduler.queue.policy import Policy
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.requests import Choice, Key, Phase
from blockyard.services.scheduler.workers.worker_groups import Group

RUNNING_TOKENS = 128  # a choice that runs weighs as many tokens to be computed: it will decode for a while yet
TOO_LONG = 1 << 40  # what it costs to end at a group's limit, where another might take more
PATIENCE = 4  # plans after which somebody who got no seat at a desk may go elsewhere

_by_key = attrgetter("key")
_NOTHING = Found()


def cost(num_tokens: int, backlog: int, num_running: int) -> tuple[int, int]:
    """Of a choice with so many tokens to be computed in a group with so many before it; the lowest is taken."""
    return (num_tokens + backlog + RUNNING_TOKENS * num_running, num_running)


@dataclass(slots=True, eq=False)
class Comer:
    """A choice at a desk, or one that came from there and is in prefill."""

    choice: Choice
    ticket: int  # its entry in the waiting queue while it stands here
    key: Key
    num_tokens: int  # to be computed, as it seemed when it came
    num_blocks: int
    since: int  # number of the last plan sent by then

    @property
    def waits(self) -> bool:
        return self.choice.ticket == self.ticket

    def left(self, group: Group) -> int:
        """Tokens that are still to be granted."""
        if self.waits:
            return self.num_tokens
        seat = self.choice.seat
        if seat is None or self.choice.phase is not Phase.RUNNING or seat.worker != group.worker:
            return 0
        return max(0, seat.prefill_end - seat.granted)


@dataclass(slots=True, eq=False)
class Desk:
    """A group, who stands before it in the order of the policy, and what it has before itself."""

    group: Group
    queue: list[Comer] = field(default_factory=list)
    comers: list[Comer] = field(default_factory=list)  # those in the queue and those in prefill
    backlog: int = 0  # tokens that they lack
    num_blocks: int = 0  # that those in the queue will take

    def refresh(self) -> None:
        """To be called when somebody is about to be placed: plans have been made since."""
        self.queue = [comer for comer in self.queue if comer.waits]
        self.num_blocks = sum(comer.num_blocks for comer in self.queue)
        known = [(comer, left) for comer in self.comers if (left := comer.left(self.group))]
        self.comers, self.backlog = [comer for comer, _ in known], sum(left for _, left in known)

    @property
    def num_choices(self) -> int:
        return len(self.group.running) + len(self.queue)

    @property
    def is_full(self) -> bool:
        return self.num_choices >= self.group.max_num_seqs

    @property
    def is_busy(self) -> bool:
        """The next plan has no tokens left for somebody else: only who finds something here has a reason to stand."""
        return self.backlog >= self.group.max_num_batched_tokens

    def num_coming(self, names: list[bytes], num_found: int) -> int:
        """Leading blocks that will be found once those who came before have been computed; names are chained."""
        most = num_found
        for comer in self.comers:
            theirs = comer.choice.names
            end = min(len(names), len(theirs))
            if end <= most or names[most] != theirs[most]:
                continue
            low, high = most + 1, end  # the first `low` are the same
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if names[middle - 1] == theirs[middle - 1] else (low, middle - 1)
            most = low
        return most

    def awaits(self, first: bytes) -> bool:
        """Somebody came whose first block has this name."""
        return any(comer.choice.names and comer.choice.names[0] == first for comer in self.comers)

    def dismiss(self, waiting: WaitingQueue) -> None:
        """All who stand here wait among the others again."""
        for comer in self.queue:
            if comer.waits:
                waiting.put_back(comer.choice)
        self.queue = []

    def add(self, comer: Comer) -> None:
        insort(self.queue, comer, key=_by_key)
        self.comers.append(comer)
        self.backlog += comer.num_tokens
        self.num_blocks += comer.num_blocks


class Placement:
    def __init__(
        self,
        waiting: WaitingQueue,
        groups: dict[int, Group],
        prefix: PrefixCache,
        policy: Policy,
        promises: Promises,
    ) -> None:
        self._waiting, self._groups, self._prefix, self._policy = waiting, groups, prefix, policy
        self._promises = promises
        self._desks: dict[int, Desk] = {}

    def dismiss(self) -> None:
        """Nobody stands at a desk: those who did wait among the others again."""
        for desk in self._desks.values():
            desk.dismiss(self._waiting)

    def place(self) -> list[Group]:
        """Sends those who wait to desks, as far as there is room. Returns the groups that somebody was sent to."""
        chosen: list[Group] = []
        if len(self._groups) < 2 or self._next() is None:
            return chosen
        desks = [self._desk(group) for group in self._groups.values()]
        for desk in desks:
            if desk.comers or desk.queue:
                desk.refresh()
                self._send_back(desk)
        desks = [desk for desk in desks if not desk.is_full]
        while desks and (choice := self._next()) is not None:
            best = self._best(desks, choice)
            if best is None:
                break
            desk, num_tokens, num_blocks = best
            self._add(desk, choice, num_tokens, num_blocks)
            chosen.append(desk.group)
            if desk.is_full:
                desks.remove(desk)
        return chosen

    def next(self, group: Group) -> Choice | None:
        """Who is next in this group: at its desk, or of all who wait if nobody has a place for him."""
        desk = self._desks.get(group.worker)
        if desk is not None:
            while desk.queue and not desk.queue[0].waits:
                desk.queue.pop(0)
            if desk.queue:
                return desk.queue[0].choice
        return self._waiting.peek()

    def claim(self, group: Group, choice: Choice) -> None:
        """Others have given way to this choice in this group: it is not to take anybody's place elsewhere, too."""
        if len(self._groups) > 1 and not choice.aside:
            self._add(self._desk(group), choice, choice.known, group.to_take(choice.known, 0, 0, []))

    def forget(self, group: Group) -> None:
        """A group is lost: those at its desk wait for another."""
        desk = self._desks.pop(group.worker, None)
        if desk is not None:
            desk.dismiss(self._waiting)

    def _next(self) -> Choice | None:
        """Who is next, if he may be seated."""
        choice = self._waiting.peek()
        if choice is None or choice.awaits_results() or not self._promises.possible(choice.request):
            return None
        return choice

    def _desk(self, group: Group) -> Desk:
        desk = self._desks.get(group.worker)
        if desk is None:
            desk = self._desks[group.worker] = Desk(group)
        return desk

    def _best(self, desks: list[Desk], choice: Choice) -> tuple[Desk, int, int] | None:
        """The desk, and the tokens and blocks that are lacking there; None without room anywhere."""
        best, lowest = None, None
        known, size, first = choice.known, 0, None
        near = _siblings(choice)
        own = max(1, known - choice.request.num_prompt)  # what a sibling has not computed of it
        for desk in desks:
            pool = desk.group.blocks
            if pool.block_size != size:
                size, first = pool.block_size, self._prefix.first_name(desk.group, choice)
            num_tokens, backlog, found = known, desk.backlog, _NOTHING
            if first is not None and (desk.group.may_hold(first) or (desk.comers and desk.awaits(first))):
                num_tokens, backlog, found = self._find(desk, choice)
            elif desk.group.worker in near:
                num_tokens = own
            elif desk.is_busy:
                continue
            too_long = TOO_LONG if known >= desk.group.max_model_len else 0
            price = cost(num_tokens, backlog + too_long, len(desk.group.running) + len(desk.queue))
            if lowest is not None and price >= lowest:
                continue
            num_blocks = desk.group.to_take(known, found.num_tokens, found.first, found.blocks)
            if pool.admits(num_blocks + desk.num_blocks, found.blocks, alone=not desk.num_choices):
                best, lowest = (desk, num_tokens, num_blocks), price
        return best

    def _find(self, desk: Desk, choice: Choice) -> tuple[int, int, Found]:
        """Tokens that are lacking, those before them, and what is there.

        What somebody before computes for both counts for neither.
        """
        found, size, coming = self._prefix.find(desk.group, choice), desk.group.blocks.block_size, 0
        if found.next_name is not None:
            num_found = found.num_tokens // size
            coming = (desk.num_coming(choice.names, num_found) - num_found) * size
        num_tokens = choice.known - found.num_tokens - coming
        return max(1, num_tokens), max(0, desk.backlog - coming), found

    def _add(self, desk: Desk, choice: Choice, num_tokens: int, num_blocks: int) -> None:
        key = self._policy.key(choice)
        self._waiting.set_aside(choice)
        desk.add(Comer(choice, choice.ticket, key, num_tokens, num_blocks, desk.group.horizon.sent))

    def _send_back(self, desk: Desk) -> None:
        """Those whom plan after plan passed over."""
        sent = desk.group.horizon.sent
        if desk.queue and sent - min(comer.since for comer in desk.queue) > PATIENCE:
            desk.dismiss(self._waiting)
            desk.refresh()


def _siblings(choice: Choice) -> set[int]:
    """Groups where others of the same prompt run."""
    others = choice.request.members
    if len(others) < 2:
        return set()
    return {c.seat.worker for c in others if c.seat is not None and c.phase is Phase.RUNNING}

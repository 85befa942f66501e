"""The waiting queue, and what each tenant and user has in it. A policy orders it, and queue_bounds.py bounds it.

It counts sequences: a request with `n` 128 is 128 of them. Parked sequences count too, but cannot be scheduled yet.
The prompts of a `Pool` are sequences of their own, but one entry in all as long as one of them waits.
Lines of batch files are counted apart: for an online request, and for its wait, they are not there.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import islice

from blockyard.services.scheduler.queue.output_lengths import OutputLengths, OutputLimit
from blockyard.services.scheduler.queue.policy import Policy
from blockyard.services.scheduler.sequences.requests import NO_AMOUNT, QueueAmount, Request, Sequence

ONE_ENTRY = QueueAmount(entries=1)
Owner = tuple[str, str]  # tenant, and user of the tenant
ShareOf = Callable[[QueueAmount], tuple[float, int]]  # share of the queue, and a second number to order equal shares


class UserUsage:
    __slots__ = ("amount", "unaccepted")

    def __init__(self) -> None:
        self.amount = NO_AMOUNT
        # requests that are not accepted yet, by `_id_of`, oldest first; of a Pool one of its prompts
        self.unaccepted: dict[str, Request] = {}

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
        self._users[request.owner].unaccepted.setdefault(_id_of(request), request)

    def remove_unaccepted(self, request: Request) -> None:
        """The request was accepted or has ended. To be called before its last amount is taken off."""
        usage = self._users.get(request.owner)
        if usage is not None:
            usage.unaccepted.pop(_id_of(request), None)

    def largest_user(self, share: ShareOf) -> Owner | None:
        """The user that would lose its newest request to make room; None if all of its requests are accepted."""
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
            amount_of_request = _waiting_amount(request)
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


class WaitingQueue:
    """Sequences that do not run: new ones, and preempted ones with the tokens that they have so far."""

    def __init__(self, policy: Policy) -> None:
        self.peek = policy.peek
        self.policy = policy
        self.usage = QueueUsage()  # of online requests
        self.batch_usage = QueueUsage()
        self.output_lengths = OutputLengths()  # of sequences that have ended
        self.output_limits: Counter[OutputLimit] = Counter()  # numbers of waiting online sequences
        self.num_dequeued = 0  # online sequences since the start
        self.num_dequeued_tokens = 0  # tokens of all dequeued sequences
        self._tickets = 0
        self._requests: Counter[str] = Counter()  # waiting and parked sequences, by `_id_of` their request
        self.num_sequences = 0

    def __len__(self) -> int:
        """Sequences that may be scheduled, without parked ones."""
        return self.num_sequences

    def push(self, sequence: Sequence) -> None:
        self._enter(sequence)
        request = sequence.request
        self._count(sequence)
        self.num_sequences += _num_waiting(sequence)
        if not request.accepted and not request.attempt and not request.is_batch_line:
            self.usage.add_unaccepted(request)

    def park(self, sequence: Sequence) -> None:
        """Counts a sequence that is pushed only when another one of its request has computed their prompt."""
        self._count(sequence)

    def unpark(self, sequence: Sequence) -> None:
        self._uncount(sequence)

    def dequeue(self, sequence: Sequence) -> None:
        """Takes out a sequence that is scheduled."""
        self.num_dequeued += not sequence.request.is_batch_line
        self.num_dequeued_tokens += sequence.num_tokens
        self.discard(sequence)

    def take_texts(self, sequence: Sequence, amount: QueueAmount) -> None:
        """Some of the texts of a sequence are scheduled, or all that waited."""
        self.num_dequeued += 0 if sequence.request.is_batch_line else amount.sequences
        self.num_dequeued_tokens += amount.tokens
        if amount == sequence.queue_amount:
            self.discard(sequence)
        else:
            self._change_texts(sequence, NO_AMOUNT.less(amount))

    def put_back_texts(self, sequence: Sequence, amount: QueueAmount) -> None:
        """Texts that were scheduled wait again."""
        if sequence.ticket:
            self._change_texts(sequence, amount)
        else:
            self.push(sequence)

    def _change_texts(self, sequence: Sequence, by: QueueAmount) -> None:
        request = sequence.request
        self.num_sequences += by.sequences
        sequence.queue_amount = sequence.queue_amount.plus(by)
        self._usage_of(request).add(request.owner, by)
        if not request.is_batch_line:
            self.output_limits[_limit(request)] += by.sequences

    def discard(self, sequence: Sequence) -> None:
        """Takes out a sequence, set aside or not. Does nothing if it is not in the queue."""
        if not sequence.ticket:
            return
        was_set_aside = sequence.is_set_aside
        sequence.ticket, sequence.is_set_aside = 0, False
        self.num_sequences -= _num_waiting(sequence)
        self._uncount(sequence)
        if not was_set_aside:
            self.policy.remove(sequence)

    def set_aside(self, sequence: Sequence) -> None:
        """Takes a sequence out of the policy's order. It still waits and counts, at a group's queue for example."""
        self.policy.remove(sequence)
        self._tickets += 1
        sequence.ticket, sequence.is_set_aside = self._tickets, True

    def requeue(self, sequence: Sequence) -> None:
        """Puts a sequence that was set aside back into the policy's order."""
        self._enter(sequence)

    def add_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        """A preempted sequence got more tokens, from plans that were in flight when it was preempted."""
        if sequence.ticket:
            more = QueueAmount(0, num_tokens)
            sequence.queue_amount = sequence.queue_amount.plus(more)
            self._usage_of(sequence.request).add(sequence.request.owner, more)

    def on_accepted(self, request: Request) -> None:
        """The request can no longer be refused to make room."""
        self.usage.remove_unaccepted(request)

    def _count(self, sequence: Sequence) -> None:
        request, name = sequence.request, _id_of(sequence.request)
        self._requests[name] += 1
        amount = sequence.queue_amount = sequence.amount
        if _is_entry(request) and self._requests[name] == 1:
            amount = amount.plus(ONE_ENTRY)
        self._usage_of(request).add(request.owner, amount)
        if not request.is_batch_line:
            self.output_limits[_limit(request)] += amount.sequences

    def _uncount(self, sequence: Sequence) -> None:
        request, amount = sequence.request, sequence.queue_amount
        if not request.is_batch_line:
            self._uncount_limit(_limit(request), amount.sequences)
        sequence.queue_amount, sequence.num_beams = NO_AMOUNT, 1  # from now on it stands for itself alone
        name = _id_of(request)
        self._requests[name] -= 1
        if not self._requests[name]:
            del self._requests[name]
            self.usage.remove_unaccepted(request)
            if _is_entry(request):
                amount = amount.plus(ONE_ENTRY)
        self._usage_of(request).add(request.owner, NO_AMOUNT.less(amount))

    def _uncount_limit(self, limit: OutputLimit, num_sequences: int) -> None:
        self.output_limits[limit] -= num_sequences
        if not self.output_limits[limit]:
            del self.output_limits[limit]

    def _usage_of(self, request: Request) -> QueueUsage:
        return self.batch_usage if request.is_batch_line else self.usage

    def _enter(self, sequence: Sequence) -> None:
        self._tickets += 1
        sequence.ticket, sequence.is_set_aside = self._tickets, False
        self.policy.push(sequence)


def _id_of(request: Request) -> str:
    """The id of a request, or of the Pool that it is a prompt of: these wait and are refused together."""
    return request.id if request.pool is None else request.pool.id


def _is_entry(request: Request) -> bool:
    """Whether its prompt is of a Pool that is an entry: the parts of a call are one."""
    return request.pool is not None and not request.pool.is_later


def _waiting_amount(request: Request) -> QueueAmount:
    """What would leave the queue if a request that is not accepted was refused."""
    requests = [request] if request.pool is None else request.pool.requests.values()
    waiting = [sequence.queue_amount for one in requests for sequence in one.active_sequences]
    entries = sum(one.entries for one in waiting) if request.pool is None else 1
    return QueueAmount(sum(one.sequences for one in waiting), sum(one.tokens for one in waiting), entries)


def _num_waiting(sequence: Sequence) -> int:
    """Beams that wait as one sequence are counted as one, texts one by one."""
    return 1 if sequence.request.texts is None else sequence.queue_amount.sequences


def _limit(request: Request) -> OutputLimit:
    return OutputLimit(request.frame.sampling.max_tokens, request.has_fixed_length)

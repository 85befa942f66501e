"""Routes sequences when groups have roles: to a group that computes the prompt and one that decodes, or to one group.

A prompt of which a decoding group lacks few tokens stays there. A longer one goes to the pair of groups with the least
cost. While transfers to a decoding group fail, it may also compute whole prompts, if that costs less than another pair.
With many groups only some are compared for each sequence: the next few of each role in turn, and the groups where
the last sequence that began alike was sent.

A sequence with an adapter goes to a pair of groups that both hold it. If no group of one role does, it waits while one
is loading the adapter; if none is, it runs in one group, and the groups of the other role are to load the adapter. If
the groups that hold it have no room, others pass it by in other groups alone.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

from blockyard.services.scheduler.admission.model_limits import exchange
from blockyard.services.scheduler.batch.worker_groups import WorkerGroup
from blockyard.services.scheduler.queue.adapter_waits import Adapters, first_lacking
from blockyard.services.scheduler.sequences.requests import Request, Sequence
from blockyard.services.scheduler.transfers.failures import LinkBackoff
from blockyard.services.scheduler.transfers.handovers import Handovers
from blockyard.services.scheduler.workers.group_queue import (
    RUNNING_TOKENS,
    GroupQueue,
    cost,
    place_cost,
    sibling_groups,
)
from blockyard.shared.messages import KVRole

NUM_COMPARED = 8  # groups of a role
MAX_REMEMBERED = 1 << 14  # beginnings of sequences
TRANSFER_SHARE = 16  # to send a token's blocks costs so much less than to compute it


@dataclass(slots=True)
class RoleGroups:
    """The groups that may serve a role. It compares `NUM_COMPARED` of them for a sequence, others for the next."""

    groups: list[WorkerGroup] = field(default_factory=list)
    _next: int = 0

    def some(self, request: Request, closed: Container[int]) -> list[WorkerGroup]:
        """With adapters: of those that hold them, first those in which a LoRA adapter has a place.

        closed: workers of groups that are not compared.
        """
        groups = [group for group in self.groups if group.worker not in closed] if closed else self.groups
        if request.adapters:
            holders = [group for group in groups if group.holds(request)]
            return sorted(holders, key=lambda group: place_cost(group, request.adapter))[:NUM_COMPARED]
        num = len(groups)
        if num <= NUM_COMPARED:
            return groups.copy()
        first, self._next = self._next % num, (self._next + NUM_COMPARED) % num
        return [groups[i % num] for i in range(first, first + NUM_COMPARED)]


@dataclass(frozen=True, slots=True)
class Placement:
    """A group that has room for a sequence."""

    queue: GroupQueue
    num_tokens: int  # to compute there
    num_blocks: int  # to take there
    price: int


def _long_enough(groups: list[WorkerGroup], num_tokens: int) -> list[WorkerGroup]:
    """The groups for sequences of so many tokens; all of them if there is none."""
    return [group for group in groups if group.max_model_len >= num_tokens] or groups


def is_pair(source: WorkerGroup, target: WorkerGroup) -> bool:
    """Whether blocks of one group can go to the other."""
    return source is not target and exchange(source.geometry, target.geometry)


class RoleRouter:
    def __init__(
        self,
        handovers: Handovers,
        links: LinkBackoff,
        queue_of: Callable[[WorkerGroup], GroupQueue],
        decode_prefill_tokens: int,
    ) -> None:
        """`decode_prefill_tokens`: a prompt of which a decoding group lacks no more is computed there."""
        self.is_active = False  # there are groups of different roles
        self._handovers, self._links, self._queue_of = handovers, links, queue_of
        self._most_there = decode_prefill_tokens
        self._prefill, self._decode = RoleGroups(), RoleGroups()
        self._recent: OrderedDict[bytes, dict[int, None]] = OrderedDict()  # workers by the first block of a sequence
        self._by_worker: dict[int, WorkerGroup] = {}
        self._closed: set[int] = set()  # workers of groups that take nothing more in this round

    def set_groups(self, groups: Iterable[WorkerGroup]) -> None:
        """Called when a group was attached or detached. Without a group of one role, the others serve as both."""
        self._by_worker = {group.worker: group for group in groups}
        every = list(self._by_worker.values())
        roles = {group.geometry.kv_role for group in every}
        self.is_active = len(roles) > 1
        self._prefill = RoleGroups([group for group in every if group.geometry.kv_role is not KVRole.DECODE])
        self._decode = RoleGroups([group for group in every if group.geometry.kv_role is not KVRole.PREFILL])

    def begin_round(self) -> None:
        """All groups may take sequences."""
        self._closed.clear()

    def close(self, request: Request) -> list[WorkerGroup]:
        """The groups that hold a request's adapters have no room for it, and take nothing behind it in this round.
        Returns the groups that are left."""
        self._closed.update(worker for worker, group in self._by_worker.items() if group.holds(request))
        return [group for worker, group in self._by_worker.items() if worker not in self._closed]

    def lacking(self, adapters: Adapters) -> int | None:
        """The adapter that sequences with these wait for. None: `place` may be asked, because groups of both roles hold
        them, or those of one role, and the other's are not loading what they lack."""
        of_prefill = first_lacking(adapters, self._prefill.groups)
        of_decode = first_lacking(adapters, self._decode.groups)
        if of_prefill is not None and of_decode is not None:
            return of_prefill
        lacking, role = (of_decode, self._decode) if of_prefill is None else (of_prefill, self._prefill)
        if lacking is None or not any(group.is_loading(lacking) for group in role.groups):
            return None
        return lacking

    def place(self, sequence: Sequence) -> Placement | None:
        """The group that a waiting sequence goes to, with a handover if it is to decode elsewhere; None: no room.

        If it has adapters, `lacking` was asked.
        """
        if sequence.handover is not None:
            self._handovers.drop(sequence)
        known = sequence.num_tokens
        request = sequence.request
        most = request.num_prompt + request.frame.sampling.max_tokens  # tokens, if its groups are long enough
        first, decode, prefill = self._candidates(sequence)
        if self._closed and not (decode and prefill):
            return None
        if request.adapters and not (decode and prefill):
            return self._remember(first, self._place_in_one(sequence, decode, prefill, most))
        longest = max(group.max_model_len for group in [*decode, *prefill])
        need = min(most, longest)
        decode = [group for group in decode if group.max_model_len >= need]
        at_decode = [(group, self._missing(group, sequence)) for group in decode]
        if (beside := self._place_beside(sequence)) is not None:
            return beside
        asked = request.transfer_params
        if asked is not None and asked.do_remote_decode:  # another request will go on with its blocks
            return self._remember(first, self._cheapest(_long_enough(prefill, need), sequence))
        near = [group for group, num in at_decode if num <= max(self._most_there, group.kv_cache.block_size)]
        if near:
            return self._remember(first, self._cheapest(near, sequence))
        may_leave = request.search is None or len(request.active_sequences) == 1  # other beams await its result
        if not may_leave or known + 1 >= need or not decode:
            fits = [group for group in prefill if group.max_model_len >= need] or decode or [*decode, *prefill]
            return self._remember(first, self._cheapest(fits, sequence))
        prefill = [group for group in prefill if group.max_model_len > known + 1]
        pairs = [(s, t) for s in prefill for t in decode if s is t or is_pair(s, t)]
        alone: list[WorkerGroup] = []  # decode groups that may compute the prompt, because transfers to them fail
        if avoided := self._links.avoided:
            alone = list(dict.fromkeys(t for s, t in pairs if (s.worker, t.worker) in avoided))
            pairs = [(s, t) for s, t in pairs if (s.worker, t.worker) not in avoided]
        if not pairs:  # their blocks do not fit together, or transfers between them fail
            fits = [group for group in prefill if group.max_model_len >= need]
            return self._remember(first, self._cheapest(list(dict.fromkeys([*fits, *decode])), sequence))
        missing = dict(at_decode)
        of_source = [pair for pair in pairs if pair[0].worker == asked.source] if asked is not None else []
        if of_source and (placement := self._place_pair(first, sequence, of_source, missing, [])) is not None:
            return placement
        return self._place_pair(first, sequence, pairs, missing, alone)

    def _place_in_one(
        self, sequence: Sequence, decode: list[WorkerGroup], prefill: list[WorkerGroup], most: int
    ) -> Placement | None:
        """Groups of one role lack its adapters, and are to load them."""
        if (adapter := sequence.request.adapter) is not None:
            for group in self._prefill.groups if decode else self._decode.groups:
                group.adapters.want(adapter)
        return self._cheapest(_long_enough(decode or prefill, most), sequence)

    def _place_beside(self, sequence: Sequence) -> Placement | None:
        """The cheapest group where other sequences of the request run; None if there is none that has room."""
        near = sibling_groups(sequence) - self._closed
        siblings = [self._by_worker[worker] for worker in near if worker in self._by_worker]
        if sequence.request.adapters:
            siblings = [group for group in siblings if group.holds(sequence.request)]
        found = (self._placement(group, sequence, is_sibling=True) for group in siblings)
        return min((one for one in found if one is not None), key=lambda one: one.price, default=None)

    def _place_pair(
        self,
        first: bytes | None,
        sequence: Sequence,
        pairs: list[tuple[WorkerGroup, WorkerGroup]],
        missing: dict[WorkerGroup, int],
        alone: list[WorkerGroup],
    ) -> Placement | None:
        """The cheapest of the pairs and of the groups that compute the prompt `alone`, in which it is then decoded."""
        placements = {
            source: self._placement(source, sequence) for source in dict.fromkeys(source for source, _ in pairs)
        }
        prices = {
            target: self._target_price(target, sequence, missing[target])
            for target in dict.fromkeys(target for _, target in pairs)
        }
        offers: list[tuple[int, int, Placement, WorkerGroup]] = []
        for source, target in pairs:
            placement, price = placements[source], prices[target]
            if placement is not None and price is not None:
                offers.append((placement.price + price, len(offers), placement, target))
        for group in alone:
            if (own := self._placement(group, sequence)) is not None:
                # its decode steps become longer, so that a pair is preferred if all else is equal
                offers.append((own.price + missing[group] // TRANSFER_SHARE, len(offers), own, group))
        for _, _, placement, target in sorted(offers):  # the numbers differ, so placements are not compared
            if placement.queue.group is target or self._handovers.reserve(sequence, placement.queue.group, target):
                return self._remember(first, placement, target)
        return None

    def _candidates(self, sequence: Sequence) -> tuple[bytes | None, list[WorkerGroup], list[WorkerGroup]]:
        """Its first block's hash, and groups to decode and to compute it, which hold its adapters."""
        request = sequence.request
        decode, prefill = self._decode.some(request, self._closed), self._prefill.some(request, self._closed)
        if not decode and not prefill:
            return None, decode, prefill
        first = (decode or prefill)[0].kv_cache.first_hash(sequence)
        known = dict(self._recent.get(first, {})) if first is not None else {}
        if (asked := sequence.request.transfer_params) is not None and asked.source is not None:
            known[asked.source] = None
        for worker in known:
            group = self._by_worker.get(worker)
            if worker in self._closed or (group is not None and request.adapters and not group.holds(request)):
                continue
            if group is not None and group.geometry.kv_role is not KVRole.PREFILL and group not in decode:
                decode.append(group)
            if group is not None and group.geometry.kv_role is not KVRole.DECODE and group not in prefill:
                prefill.append(group)
        return first, decode, prefill

    def _remember(
        self, first: bytes | None, placement: Placement | None, target: WorkerGroup | None = None
    ) -> Placement | None:
        if placement is not None and first is not None:
            self._recent[first] = {placement.queue.group.worker: None} | ({target.worker: None} if target else {})
            self._recent.move_to_end(first)
            if len(self._recent) > MAX_REMEMBERED:
                self._recent.popitem(last=False)
        return placement

    def _missing(self, group: WorkerGroup, sequence: Sequence) -> int:
        """Tokens that are not cached there."""
        first = group.kv_cache.first_hash(sequence)
        if first is None or not group.kv_cache.may_have_cached(first):
            return sequence.num_tokens
        return sequence.num_tokens - group.kv_cache.find(sequence).num_tokens

    def _cheapest(self, groups: list[WorkerGroup], sequence: Sequence) -> Placement | None:
        found = [placement for group in groups if (placement := self._placement(group, sequence)) is not None]
        return min(found, key=lambda placement: placement.price, default=None)

    def _placement(self, group: WorkerGroup, sequence: Sequence, is_sibling: bool = False) -> Placement | None:
        """None if the group has no room. `is_sibling`: another sequence that runs there has computed its prompt."""
        queue = self._queue_of(group)
        if self._num_sequences(queue) >= group.max_num_seqs:
            return None
        num_tokens, backlog, found = queue.find(sequence)
        if is_sibling:
            num_tokens = min(num_tokens, max(1, sequence.num_tokens - sequence.request.num_prompt))
        elif queue.is_busy and not found.num_tokens:
            return None
        pool, alone = group.kv_cache.blocks, not group.running
        num_blocks = group.kv_cache.num_blocks_to_take(sequence.num_tokens, found, alone)
        if not pool.admits(num_blocks + queue.num_blocks, found.blocks, alone=not queue.num_sequences):
            return None
        extra = place_cost(group, sequence.request.adapter)
        price, _ = cost(num_tokens, backlog + extra, self._num_sequences(queue))
        return Placement(queue, num_tokens, num_blocks, price)

    def _target_price(self, group: WorkerGroup, sequence: Sequence, num_missing: int) -> int | None:
        """The cost of a group that decodes what another one computes; None if it has no room."""
        queue = self._queue_of(group)
        num_sequences = self._num_sequences(queue)
        if num_sequences >= group.max_num_seqs:
            return None
        num_blocks = group.kv_cache.num_blocks_to_receive(sequence.num_tokens, num_missing)
        if not group.kv_cache.blocks.admits(num_blocks + queue.num_blocks, [], alone=not num_sequences):
            return None
        extra = place_cost(group, sequence.request.adapter)
        return num_missing // TRANSFER_SHARE + queue.backlog + extra + RUNNING_TOKENS * num_sequences

    def _num_sequences(self, queue: GroupQueue) -> int:
        """Sequences that run, wait for the next plan, or are on their way."""
        return queue.num_sequences + self._handovers.num_inbound[queue.group.worker]

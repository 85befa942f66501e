"""Prefix caching: what of a choice's tokens need not be computed, and what others will find of them."""

from dataclasses import dataclass, field

from blockyard.services.scheduler.kv_cache.block_hashes import Naming
from blockyard.services.scheduler.sequences.requests import NEVER, Choice, Seat
from blockyard.services.scheduler.workers.worker_groups import Group
from blockyard.shared.block_names import NAME_BYTES, split_names
from blockyard.shared.messages import Attached, BlockName


@dataclass(slots=True)
class Found:
    """What there is of a waiting choice's leading blocks."""

    blocks: list[int] = field(default_factory=list)  # those on the device, in their order, behind `first`
    next_name: bytes | None = None  # of the first block that is to be computed, if that could be found at all
    counts: bool = False  # the choice asked
    num_tokens: int = 0  # that need not be computed
    copy_from: int | None = None  # block that holds the last of those, and is to be copied
    host: dict[int, bytes] = field(default_factory=dict)  # places, between or behind those, of what is to be fetched
    held: list[int] = field(default_factory=list)  # where in host memory, once it is decided that they are fetched
    first: int = 0  # leading places that are behind the model's window: nothing is needed there

    @property
    def num_places(self) -> int:
        """Leading blocks that need not be computed."""
        return self.first + len(self.blocks) + len(self.host)


class PrefixCache:
    """Names blocks and finds them; which blocks there are is each group's own affair."""

    def __init__(self, scope: str, enabled: bool) -> None:
        self.num_queries = 0  # tokens that were looked up
        self.num_hits = 0  # tokens that were found
        self._naming, self._enabled = Naming(scope, enabled), enabled

    def find(self, group: Group, choice: Choice) -> Found:
        """Leading full blocks of a choice that have been computed. Its last known token never is among them."""
        if not (self._enabled or group.blocks.host.num_ids):
            return Found()
        names = self._naming.names(choice, group.blocks.block_size, choice.known)
        if choice.request.frame.sampling.num_prompt_logprobs is not None:
            return Found()  # they are computed along with the KV
        most = (choice.known - 1) // group.blocks.block_size
        if group.window.size is not None:
            found = _find_window(group, names[:most])
        else:
            found = Found(group.blocks.index.find(names, most))
            if len(found.blocks) < most and group.blocks.host.num_used:
                _find_in_host(group, names[:most], found)
        found.counts = self._enabled
        num_found = found.num_places
        found.num_tokens = num_found * group.blocks.block_size
        found.next_name = names[num_found] if num_found < most else None
        return found

    def first_name(self, group: Group, choice: Choice) -> bytes | None:
        """Of a choice's first full block, if that could be found."""
        size = group.blocks.block_size
        if not (self._enabled or group.blocks.host.num_ids) or choice.known <= size:
            return None
        if choice.request.frame.sampling.num_prompt_logprobs is not None:
            return None
        return self._naming.names(choice, size, choice.known)[0]

    def seated(self, group: Group, seat: Seat, found: Found) -> None:
        """The choice has its seat, with what was found."""
        size = group.blocks.block_size
        choice = seat.choice
        if found.host:
            _fetch(group, seat, found)
        if found.first:
            seat.num_freed = found.first
            seat.blocks[:0] = seat.blocks[:1] * found.first
            seat.capacity += found.first * size
        seat.num_found = seat.num_named = found.num_places
        seat.granted = seat.computed = found.num_tokens
        seat.copied_from = found.copy_from
        if self._enabled:
            seat.name_at = (seat.num_named + 1) * size
        if found.counts:
            self.num_queries += choice.known
            self.num_hits += seat.computed
        if choice.num_cached is None:
            choice.num_cached = min(seat.computed, choice.request.num_prompt)

    def fills(self, group: Group, seat: Seat) -> dict[bytes, int]:
        """Blocks by name that a plan will fill which takes a seat in prefill as far as it is granted now."""
        size = group.blocks.block_size
        end = min(seat.granted, seat.prefill_end) // size
        if seat.name_at == NEVER or end <= seat.num_named:
            return {}
        first, seat.num_named = seat.num_named, end
        seat.name_at = (end + 1) * size
        return dict(zip(seat.choice.names[first:end], seat.blocks[first:end], strict=True))

    def due(self, group: Group, seat: Seat) -> None:
        """Results say that a seat outside of the lane has KV up to `seat.computed`: it has filled a block."""
        if not seat.is_due:
            seat.is_due = True
            group.due.append(seat)

    def catch_up(self, group: Group) -> None:
        """Names what has been filled. Some seats a plan: they may all fill a block in the same step."""
        due = group.due
        for _ in range(min(len(due), len(due) // 8 + 16)):
            seat = due.popleft()
            seat.is_due = False
            if seat.computed >= seat.name_at:
                self._computed(group, seat)

    def leave(self, group: Group, seat: Seat) -> None:
        """A seat is about to be vacated: names what has not been named of it."""
        if seat.name_at != NEVER:
            self._computed(group, seat)

    def pause(self, group: Group, seat: Seat) -> None:
        """A seat is about to be preempted: what is not for others gets names for when its choice comes back."""
        if not self._enabled and group.blocks.host.num_ids:
            self._computed(group, seat)

    def forget(self, group: Group, choice: Choice) -> None:
        """A choice has ended: where blocks are not for others, nobody will ask for its own again."""
        if self._enabled or not choice.names:
            return
        request, index = choice.request, group.blocks.index
        names = choice.names[request.num_prompt // choice.names_size if request.choices else 0 :]
        group.blocks.spoil([block for name in names if (block := index.get(name)) is not None])
        group.blocks.host.forget(names)

    def _computed(self, group: Group, seat: Seat) -> None:
        size = group.blocks.block_size
        choice = seat.choice
        end = max(seat.num_named, seat.computed // size)
        names = self._naming.names(choice, size, end * size)
        put, blocks = group.blocks.index.put, seat.blocks
        for i in range(max(seat.num_named, seat.num_freed), end):
            put(blocks[i], names[i])
        seat.num_named = end
        seat.name_at = (end + 1) * size

    def adopt(self, group: Group, frame: Attached) -> None:
        """A worker that was attached says what its blocks hold."""
        names, blocks = frame.block_names, frame.block_ids
        fits = len(names) == len(blocks) * NAME_BYTES and all(0 <= b < group.blocks.num_ids for b in blocks)
        if self._enabled and fits:
            group.blocks.adopt(blocks, split_names(names))
        host, names = frame.host_block_ids, frame.host_block_names
        fits = len(names) == len(host) * NAME_BYTES and all(0 <= b < group.blocks.host.num_ids for b in host)
        if self._enabled and fits:
            group.blocks.host.adopt(host, split_names(names))

    def news(self, group: Group) -> list[BlockName]:
        """What is to be told with the next plan: full once that has run."""
        news = group.blocks.index.take_news()
        return [*map(BlockName, news.keys(), news.values())] if news else []


def _find_window(group: Group, names: list[bytes]) -> Found:
    """The most that a choice may begin with where only its window's blocks are needed."""
    on_device, in_host = group.blocks.index.get, group.blocks.host.get
    num_found, first = group.window.best(names, lambda n: on_device(n) is not None or in_host(n) is not None)
    found = Found(first=first)
    for place in range(first, num_found):
        if (block := on_device(names[place])) is not None:
            found.blocks.append(block)
        else:
            found.host[place] = names[place]
    return found


def _find_in_host(group: Group, names: list[bytes], found: Found) -> None:
    """Goes on, block by block, where the device has no more of a chain from its beginning."""
    on_device, in_host, host = group.blocks.index.get, group.blocks.host.get, found.host
    start = len(found.blocks)
    if in_host(names[start]) is None:
        return
    rest = names[start:]
    if group.blocks.index.has_none(rest):  # most often: then it is one look at all, at C's speed
        there = [*map(group.blocks.host.has, rest)]
        end = there.index(False) if False in there else len(there)
        found.host = dict(zip(range(start, start + end), rest[:end], strict=True))
        return
    for place in range(start, len(names)):
        name = names[place]
        if (block := on_device(name)) is not None:
            found.blocks.append(block)
        elif in_host(name) is not None:
            host[place] = name
        else:
            return


def _fetch(group: Group, seat: Seat, found: Found) -> None:
    """Of the seat's own blocks, behind those that were found, the first ones are filled from host memory."""
    num_here = len(found.blocks)
    reserved = seat.blocks[num_here : num_here + len(found.host)]
    if next(iter(found.host)) < found.first + num_here:  # some stand between those that are here
        here, fresh = iter(seat.blocks[:num_here]), iter(reserved)
        places = range(found.first, found.num_places)
        table = [next(fresh if place in found.host else here) for place in places]
        seat.blocks[: len(table)] = table
    group.blocks.host.fetch(found.held, reserved)
    group.blocks.index.put_new(reserved, list(found.host.values()))

"""Prefix caching: what of a choice's tokens need not be computed, and what others will find of them."""

from dataclasses import dataclass, field

from blockyard.services.scheduler.groups import Group
from blockyard.services.scheduler.requests import ID_BYTES, NEVER, Choice, Seat
from blockyard.shared.block_names import NAME_BYTES, block_names, root_name
from blockyard.shared.messages import Attached, BlockName


@dataclass(slots=True)
class Found:
    """What the index has of a waiting choice."""

    blocks: list[int] = field(default_factory=list)
    next_name: bytes | None = None  # of the first block that is to be computed, if that could be found at all
    counts: bool = False  # the choice asked


class PrefixCache:
    """Names blocks and finds them; which blocks there are is each group's own affair."""

    def __init__(self, scope: str, enabled: bool) -> None:
        self.num_queries = 0  # tokens that were looked up
        self.num_hits = 0  # tokens that were found
        self._scope, self._enabled = scope, enabled

    def find(self, group: Group, choice: Choice) -> Found:
        """Leading full blocks of a choice that have been computed. Its last known token never is among them."""
        if not self._enabled:
            return Found()
        names = self._names(choice, group.blocks.block_size, choice.known)
        if choice.request.frame.sampling.num_prompt_logprobs is not None:
            return Found()  # they are computed along with the KV
        most = (choice.known - 1) // group.blocks.block_size
        blocks = group.blocks.index.find(names, most)
        return Found(blocks, names[len(blocks)] if len(blocks) < most else None, True)

    def seated(self, group: Group, seat: Seat, found: Found) -> None:
        """The choice has its seat, with what was found."""
        size = group.blocks.block_size
        choice = seat.choice
        seat.num_found = seat.num_named = len(found.blocks)
        seat.granted = seat.computed = seat.num_found * size
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
        """Results say that a seat has KV up to `seat.computed`: generated tokens have filled a block."""
        if not seat.is_due:
            seat.is_due = True
            seat.name_at += group.blocks.block_size  # until then there is no need to ask again
            group.due.append(seat)

    def catch_up(self, group: Group) -> None:
        """Names what has been filled. Some seats a plan: they may all fill a block in the same step."""
        due = group.due
        for _ in range(min(len(due), len(due) // 2 + 16)):
            seat = due.popleft()
            seat.is_due = False
            if seat.name_at != NEVER:
                self._computed(group, seat)

    def leave(self, group: Group, seat: Seat) -> None:
        """A seat is about to be vacated: names what has not been named of it."""
        if seat.name_at != NEVER:
            self._computed(group, seat)

    def _computed(self, group: Group, seat: Seat) -> None:
        size = group.blocks.block_size
        choice = seat.choice
        known = choice.request.num_prompt + len(choice.outputs)
        end = max(seat.num_named, min(seat.computed, known) // size)
        names = self._names(choice, size, end * size)
        put, blocks = group.blocks.index.put, seat.blocks
        for i in range(seat.num_named, end):
            put(blocks[i], names[i])
        seat.num_named = end
        seat.name_at = (end + 1) * size

    def spoilt(self, group: Group, failed: Seat) -> list[Seat]:
        """A seat failed, and its worker has scrubbed its blocks: nobody finds what it wrote, or what was made of it.

        Returns the running seats that read it and have to start over.
        """
        bad = set(failed.blocks[failed.num_found :])
        near = {id(seat): seat for record in group.flight for seat in record.seats.values()}
        near |= {id(seat): seat for seat in group.running}
        readers = [s for s in near.values() if s is not failed and not bad.isdisjoint(s.blocks[: s.num_found])]
        for seat in (failed, *readers):
            group.blocks.spoil(seat.blocks if seat is failed else seat.blocks[seat.num_found :])
            seat.num_named, seat.name_at = 0, NEVER
        return [seat for seat in readers if seat in group.running]

    def adopt(self, group: Group, frame: Attached) -> None:
        """A worker that was attached says what its blocks hold."""
        names, blocks = frame.block_names, frame.block_ids
        fits = len(names) == len(blocks) * NAME_BYTES and all(0 <= b < group.blocks.num_ids for b in blocks)
        if self._enabled and fits:
            group.blocks.adopt(blocks, _split(names))

    def news(self, group: Group) -> list[BlockName]:
        """What is to be told with the next plan: full once that has run."""
        news = group.blocks.index.take_news()
        return [BlockName(block, name) for block, name in news.items()] if news else []

    def _names(self, choice: Choice, block_size: int, num_tokens: int) -> list[bytes]:
        """Names of the choice's full blocks, kept with it; the first `num_tokens` of its tokens are known."""
        if choice.names_size != block_size:
            choice.names_size, choice.names = block_size, self._prompt_names(choice, block_size)
        names = choice.names
        missing = num_tokens // block_size - len(names)
        if missing > 0:
            first = len(names) * block_size
            parent = names[-1] if names else self._root(choice)
            new = block_names(parent, _ids(choice, first, first + missing * block_size), block_size)
            names += [new] if missing == 1 else _split(new)
        return names

    def _prompt_names(self, choice: Choice, block_size: int) -> list[bytes]:
        """As they came with the request; none if they are those of another block size."""
        given = choice.request.frame.block_names
        fits = len(given) == choice.request.num_prompt // block_size * NAME_BYTES
        return _split(given) if fits else []

    def _root(self, choice: Choice) -> bytes:
        frame = choice.request.frame
        return root_name(self._scope, frame.adapter, frame.cache_salt)


def _split(names: bytes) -> list[bytes]:
    return [names[i : i + NAME_BYTES] for i in range(0, len(names), NAME_BYTES)]


def _ids(choice: Choice, first: int, end: int) -> bytes:
    """Token ids from `first` to before `end`, which runs from the prompt into the outputs."""
    request = choice.request
    start = first - request.num_prompt
    if start >= 0:
        return choice.outputs[start : end - request.num_prompt].tobytes()
    ids = request.frame.prompt_ids[first * ID_BYTES : end * ID_BYTES]
    return ids + choice.outputs[: max(0, end - request.num_prompt)].tobytes()

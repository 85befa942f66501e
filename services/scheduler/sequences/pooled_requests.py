"""Requests for vectors, scores or classes of many prompts.

For a decoder each prompt is a `Request` of its own in the queue and batch. For a model without KV all prompts are one
`Request` with a sequence that steps take in slices. A `PooledRequest` is what they have in common: the gateway, the
attempt and the acceptance.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from blockyard.services.scheduler.sequences.packed_texts import PackedTexts
from blockyard.services.scheduler.sequences.requests import Request, Sequence, make_sequence
from blockyard.shared.messages import ChoiceState, Generate, Pool, PooledStart, PoolingCard, Sampling
from blockyard.shared.token_ids import ID_BYTES, num_ids, unpack

NO_TOKENS = Sampling(max_tokens=0)
PACKED = -1  # in place of an index: all prompts
LAST = "LAST"


@dataclass(slots=True, eq=False)
class PooledRequest:
    """A Pool of a gateway. It ends with the last of its prompts."""

    id: str
    attempt: int
    gateway: int  # incarnation
    arrival: int
    arrival_s: float
    owner: tuple[str, str]
    finds_prefix: bool  # leading tokens that are cached need not be computed
    accepted: bool = False
    requests: dict[int, Request] = field(default_factory=dict)  # by index: the prompts without a result; or PACKED
    is_later: bool = False  # as in Pool

    def rebind(self, attempt: int, gateway: int) -> None:
        """The gateway has sent it again. It is to be accepted again."""
        self.attempt, self.gateway, self.accepted = attempt, gateway, False
        for request in self.requests.values():
            request.attempt, request.gateway = attempt, gateway

    def add(self, prompt: "PooledPrompt", frame: Pool) -> Sequence:
        """Adds a prompt, and returns its sequence, which is to be queued."""
        return self._add(prompt.index, prompt.token_ids, frame, pooled=prompt.start)

    @property
    def packed(self) -> Sequence | None:
        """The sequence of all prompts; None if each has its own, or there are none."""
        request = self.requests.get(PACKED)
        return None if request is None else request.sequences[PACKED]

    def add_packed(self, frame: Pool) -> Sequence:
        """Adds all prompts of a frame as one sequence, which is to be queued."""
        return self._add(PACKED, b"", frame, texts=PackedTexts(frame))

    def _add(
        self,
        index: int,
        token_ids: bytes,
        frame: Pool,
        pooled: PooledStart | None = None,
        texts: PackedTexts | None = None,
    ) -> Sequence:
        generate = Generate(
            f"{self.id}\0{index}", self.attempt, frame.model, token_ids, b"", NO_TOKENS, None,
            [ChoiceState(index)], frame.priority, frame.tenant, frame.cache_salt, frame.user,
            batch_line=frame.batch_line,
        )  # fmt: skip
        request = Request(
            generate.request_id,
            self.attempt,
            generate,
            self.gateway,
            self.arrival,
            num_ids(token_ids),
            accepted=self.accepted,
            arrival_s=self.arrival_s,
            owner=self.owner,
            is_batch_line=frame.batch_line,
            pool=self,
            pooled=pooled,
            texts=texts,
        )
        self.requests[index] = request
        sequence = make_sequence(request, index, b"")
        request.add_sequences([sequence])
        return sequence

    def set_accepted(self) -> None:
        self.accepted = True
        for request in self.requests.values():
            request.accepted = True

    def on_ended(self, index: int) -> None:
        """A prompt has its result, or is dropped."""
        del self.requests[index]


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    index: int
    token_ids: bytes
    start: PooledStart


def prompts_of(frame: Pool) -> Iterator[PooledPrompt]:
    """Yields the prompts of a frame that `frame_problem` has nothing against."""
    seconds = unpack(frame.second_starts) if frame.second_starts else None
    plain = PooledStart(frame.params, None, frame.skip)
    first = 0
    for i, (index, length) in enumerate(zip(unpack(frame.indexes), unpack(frame.lengths), strict=True)):
        end = first + ID_BYTES * length
        start = plain if seconds is None else PooledStart(frame.params, seconds[i], frame.skip)
        yield PooledPrompt(index, frame.token_ids[first:end], start)
        first = end


def frame_problem(frame: Pool) -> str:
    """Says why the columns of a frame contradict each other; empty if they do not."""
    columns = [frame.indexes, frame.lengths, *([frame.second_starts] if frame.second_starts else [])]
    if any(len(column) % ID_BYTES or len(column) != len(frame.indexes) for column in columns) or not frame.indexes:
        return f"{len(frame.indexes)} and {len(frame.lengths)} bytes of indexes and lengths"
    if len(set(unpack(frame.indexes))) != num_ids(frame.indexes):
        return "a prompt appears twice"
    if ID_BYTES * sum(unpack(frame.lengths)) != len(frame.token_ids):
        return f"{len(frame.token_ids)} bytes of token ids, the lengths say {sum(unpack(frame.lengths))} tokens"
    return ""


def finds_prefix(frame: Pool, card: PoolingCard | None) -> bool:
    """Whether the result does not depend on hidden states of tokens that are cached: only LAST does not."""
    if card is None or not card.has_kv:
        return False
    return (frame.params.pooling_type or card.pooling).upper() == LAST

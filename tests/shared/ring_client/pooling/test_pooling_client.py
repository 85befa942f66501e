"""A call of many texts: the jobs of tokenizers, what a new attempt asks for, and what a client hears of failures."""

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from fake_links import FakeLinks
from fake_ring import CARD, SCHEDULER, TOKENIZER, member

from blockyard.shared.bus.member_list import Gone, Joined
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import (
    Accepted,
    Cancel,
    FinishReason,
    Member,
    NamedPrompt,
    Pool,
    PoolingCard,
    PoolingTask,
    QueueCapacity,
    Refused,
    Role,
    TextRejected,
    TextsTokenized,
    TokenizeTexts,
    VectorBatch,
    VectorBlock,
    VectorFailure,
)
from blockyard.shared.ring_client.client import RingClient
from blockyard.shared.ring_client.pooling.calls import PooledAnswer, PoolingCall
from blockyard.shared.ring_client.pooling.text_jobs import FIRST_BYTES, MANY_BYTES
from blockyard.shared.ring_client.tokenizer_client import QUICK_BYTES
from blockyard.shared.token_ids import num_ids

ROOM = QueueCapacity(10, 1000)
POOLING = PoolingCard(
    PoolingTask.EMBED, 2, 64, prompts=[NamedPrompt("query", "q: ")], pooling="MEAN", include_prompt=False
)


class Ring:
    """A client; the test is its tokenizer and its scheduler. A text is as many tokens as it has characters."""

    def __init__(self, has_kv: bool = False) -> None:
        card = msgspec.structs.replace(CARD, pooling=msgspec.structs.replace(POOLING, has_kv=has_kv))
        self.tokenizer = member(Role.TOKENIZER_POOL, TOKENIZER)
        self.scheduler = member(Role.SCHEDULER, SCHEDULER, card=card)
        self.links = FakeLinks(Member("api_gateway", Role.API_GATEWAY, 99, "ipc:///99"), self.tokenizer, self.scheduler)
        self.client = RingClient(self.links, ["tiny"], 60.0, clock=lambda: 1.0)
        for one in (self.tokenizer, self.scheduler):
            self.client.handle(one.incarnation, Joined(one))

    def ask(self, inputs: Sequence[Any], **fields: Any) -> "asyncio.Task[PooledAnswer]":
        call = PoolingCall(model=None, inputs=inputs, **({"request_id": "r"} | fields))
        return asyncio.ensure_future(self.client.pooling.pool(call))

    def take(self, kind: type[Any]) -> list[Any]:
        found = [frame for _, frame in self.links.sent if isinstance(frame, kind)]
        self.links.sent = [(to, frame) for to, frame in self.links.sent if not isinstance(frame, kind)]
        return found

    async def tokenize(self) -> list[TokenizeTexts]:
        """Answers the jobs of tokenizers."""
        jobs: list[TokenizeTexts] = []
        while True:
            for _ in range(5):
                await asyncio.sleep(0)
            if not (found := self.take(TokenizeTexts)):
                return jobs
            for job in found:
                self.answer(job)
            jobs += found

    def answer(self, job: TokenizeTexts) -> None:
        lengths = array("I", map(len, job.texts))
        ids = array("I", [5]) * sum(lengths)
        skip = 3 if job.counts_prompt and job.prompt else 0
        self.client.handle(TOKENIZER, TextsTokenized(job.request_id, ids.tobytes(), lengths.tobytes(), skip=skip))

    def hear(self, attempt: int, **results: Any) -> None:
        self.client.handle(SCHEDULER, VectorBatch([block(attempt, **results)]))


def block(
    attempt: int,
    indexes: Sequence[int] = (),
    size: int = 2,
    failures: Sequence[VectorFailure] = (),
    request_id: str = "r",
) -> VectorBlock:
    data = array("f", [float(10 * index + i) for index in indexes for i in range(size)])
    lengths = array("I", [size] * len(indexes))
    return VectorBlock(
        request_id, attempt, array("I", indexes).tobytes(), lengths.tobytes(), data.tobytes(), failures=list(failures)
    )


async def test_results_come_in_any_order_and_in_parts() -> None:
    ring = Ring()
    task = ring.ask(["abc", [7, 8], "d"])
    (job,) = await ring.tokenize()
    assert job.texts == ["abc", "d"] and job.quick
    (pool,) = ring.take(Pool)
    assert array("I", pool.lengths).tolist() == [3, 2, 1]
    assert not pool.later_prompts and not pool.is_later
    assert array("I", pool.token_ids).tolist() == [5, 5, 5, 7, 8, 5]
    ring.client.handle(SCHEDULER, Accepted("r", 0, None, ROOM))
    ring.hear(0, indexes=[2])
    ring.hear(0, indexes=[0, 1])
    answer = await task
    assert [item.data.tolist() for item in answer.items] == [[0, 1], [10, 11], [20, 21]]
    assert (answer.num_tokens, ring.client.num_open(), ring.client.meters.ended[FinishReason.STOP]) == (6, 0, 3)
    assert not ring.take(Cancel)


@pytest.mark.parametrize(("side", "cut"), [("left", [8, 9]), ("right", [7, 8])])
async def test_ids_are_cut_as_they_are(side: str, cut: list[int]) -> None:
    """Special ones like others, and no tokenizer is asked."""
    ring = Ring()
    task = ring.ask([[7, 8, 9], [4]], truncate_prompt_tokens=2, truncation_side=side)
    assert not await ring.tokenize()
    (pool,) = ring.take(Pool)
    assert array("I", pool.token_ids).tolist() == [*cut, 4]
    task.cancel()


@pytest.mark.parametrize("wrong", [[7, 2.5], [-1], [], [CARD.vocab_size], [5] * 65, b"12345"])
async def test_ids_that_are_wrong_are_named(wrong: Any) -> None:
    with pytest.raises(RequestError) as caught:
        await Ring().ask(["abc", [7, 8], wrong])
    assert (caught.value.field, caught.value.status) == ("input[2]", 400)


async def test_texts_are_divided_into_quick_jobs_and_a_long_one_stands_alone() -> None:
    ring = Ring()
    longest = "x" * (QUICK_BYTES + 1)
    other = ring.ask(["a"], request_id="other")
    await ring.tokenize()
    task = ring.ask(["y" * (QUICK_BYTES // 2)] * 3 + [longest])
    jobs = await ring.tokenize()
    assert sorted(len(job.texts) for job in jobs) == [1, 1, 2]
    assert [job.texts for job in jobs if not job.quick] == [[longest]]
    assert [num_ids(pool.lengths) for pool in ring.take(Pool)] == [1, 4], "a call beside others is one request"
    task.cancel()
    other.cancel()


MANY = [str(i).rjust(FIRST_BYTES // 4, "t") for i in range(MANY_BYTES // FIRST_BYTES * 4 + 1)]


async def test_a_call_with_many_texts_is_sent_as_it_is_tokenized() -> None:
    """The first part is small. Answers come in any order."""
    ring = Ring()
    task = ring.ask([[7], *MANY])
    for _ in range(5):
        await asyncio.sleep(0)
    (given,) = ring.take(Pool)  # ids need no tokenizer
    assert array("I", given.lengths).tolist() == [1]
    first, second = ring.take(TokenizeTexts)
    assert (first.texts, second.texts) == (MANY[:4], MANY[4:12])
    parts: list[Pool] = []
    for job in (second, first):
        ring.answer(job)
        await asyncio.sleep(0)
        parts += ring.take(Pool)
    assert [num_ids(part.lengths) for part in parts] == [8, 4]
    await ring.tokenize()
    parts += ring.take(Pool)
    assert ring.client.pooling.num_waiting_tokens == 1 + sum(map(len, MANY))
    for part in reversed([given, *parts]):
        ring.hear(0, indexes=range(num_ids(part.lengths)), request_id=part.request_id)
    answer = await task
    assert [item.num_tokens for item in answer.items] == [1, *map(len, MANY)]
    assert answer.items[5].data[0] == 0, "the first of its part"
    assert (ring.client.num_open(), ring.client.meters.requests) == (0, 1)
    # a scheduler takes or refuses a call by its first part
    assert (given.later_prompts, given.later_tokens, given.is_later) == (len(MANY), len(MANY), False)
    assert {(part.later_prompts, part.is_later) for part in parts} == {(0, True)}


async def test_a_call_to_a_decoder_is_not_divided() -> None:
    ring = Ring(has_kv=True)
    task = ring.ask(MANY)
    await ring.tokenize()
    assert [num_ids(pool.lengths) for pool in ring.take(Pool)] == [len(MANY)]
    task.cancel()


async def test_a_part_that_fails_ends_the_call() -> None:
    ring = Ring()
    task = ring.ask(MANY, field="documents")
    for _ in range(5):
        await asyncio.sleep(0)
    first, second = ring.take(TokenizeTexts)
    ring.answer(second)
    await asyncio.sleep(0)
    (part,) = ring.take(Pool)
    ring.client.handle(SCHEDULER, Refused(part.request_id, 0, 400, "input[1]", "too long", ROOM))
    ring.answer(first)
    with pytest.raises(RequestError) as caught:
        await task
    assert caught.value.field == "documents[5]"
    assert not ring.client.num_open() and not ring.take(Pool)


async def test_a_client_that_leaves_cancels_all_parts() -> None:
    ring = Ring()
    task = ring.ask(MANY)
    await ring.tokenize()
    parts = ring.take(Pool)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [one.request_id for one in ring.take(Cancel)] == [part.request_id for part in parts]


async def test_a_job_that_breaks_its_limits_is_divided_to_find_the_text() -> None:
    ring = Ring()
    task = ring.ask(["a", "b", "bad", "d"])
    for _ in range(4):
        for _ in range(5):
            await asyncio.sleep(0)
        for job in ring.take(TokenizeTexts):
            if "bad" in job.texts:
                ring.client.handle(TOKENIZER, TextRejected(job.request_id, "input", "it takes too long"))
    with pytest.raises(RequestError, match="too long") as caught:
        await task
    assert caught.value.field == "input[2]"


async def test_a_new_attempt_asks_for_what_is_missing() -> None:
    ring = Ring()
    task = ring.ask(["a", "bb", "ccc"])
    await ring.tokenize()
    ring.take(Pool)
    ring.hear(0, indexes=[1])
    ring.client.handle(SCHEDULER, Gone(ring.links.members.pop(SCHEDULER)))
    ring.links.members[SCHEDULER] = ring.scheduler
    ring.client.handle(SCHEDULER, Joined(ring.scheduler))
    (again,) = ring.take(Pool)
    assert array("I", again.indexes).tolist() == [0, 2] and array("I", again.lengths).tolist() == [1, 3]
    ring.hear(again.attempt - 1, indexes=[0])  # late
    assert ring.client.num_open() == 2
    ring.hear(again.attempt, indexes=[0, 2])
    assert [item.data[0] for item in (await task).items] == [0, 10, 20]


async def test_a_block_that_is_cut_is_asked_for_again() -> None:
    ring = Ring()
    task = ring.ask(["a", "b"])
    await ring.tokenize()
    ring.take(Pool)
    for wrong in (
        msgspec.structs.replace(block(0, [0]), data=b"\0"),
        msgspec.structs.replace(block(1, [0]), lengths=b""),
        block(2, [7]),
    ):
        ring.client.handle(SCHEDULER, VectorBatch([wrong]))
    assert [again.attempt for again in ring.take(Pool)] == [1, 2, 3]
    ring.hear(3, indexes=[0, 1])
    assert len((await task).items) == 2


async def test_failures_name_the_input() -> None:
    ring = Ring()
    task = ring.ask(["a", "b"], field="documents")
    await ring.tokenize()
    ring.hear(0, indexes=[0], failures=[VectorFailure(1, "it broke", 422)])
    with pytest.raises(RequestError, match="it broke") as caught:
        await task
    assert (caught.value.field, caught.value.status) == ("documents[1]", 422)
    assert ring.client.meters.ended[FinishReason.FAILED] >= 1
    task = ring.ask(["a", "b"])
    await ring.tokenize()
    ring.client.handle(SCHEDULER, Refused("r", 0, 400, "input[1]", "too long", ROOM))
    with pytest.raises(RequestError) as caught:
        await task
    assert caught.value.field == "input[1]"


async def test_a_client_that_leaves_cancels_what_is_open() -> None:
    ring = Ring()
    task = ring.ask(["a", "b"])
    await ring.tokenize()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert ring.take(Cancel) == [Cancel("r", 0)] and not ring.client.num_open()
    ring.hear(0, indexes=[0])  # an unknown request is cancelled again
    assert ring.take(Cancel) == [Cancel("r", 0)]


async def test_prompts_go_before_texts_and_may_not_be_pooled() -> None:
    ring = Ring()
    task = ring.ask(["abc"], prompt_name="query")
    (job,) = await ring.tokenize()
    assert (job.prompt, job.counts_prompt) == ("q: ", True)
    (pool,) = ring.take(Pool)
    assert pool.skip == 3
    ring.hear(0, indexes=[0])
    await task

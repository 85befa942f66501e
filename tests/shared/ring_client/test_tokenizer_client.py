"""Prompts that need a tokenizer, and prompts that are returned without one."""

import asyncio
import math
from collections.abc import Callable

import msgspec
import pytest
from fake_links import FakeLinks

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import (
    BUSY,
    TAKES_LONG,
    UNAVAILABLE,
    Detokenize,
    Grammar,
    GrammarKind,
    Member,
    ModelCard,
    Role,
    TextRejected,
    Tokenize,
    Tokenized,
    TokenizeTexts,
)
from blockyard.shared.ring_client.tokenizer_client import BRIEF_CHARS, QUICK_BYTES, SHORT_IDS, TokenizerClient
from blockyard.shared.ring_client.tokenizer_jobs import MAX_LOST, MAX_WAITING
from blockyard.shared.token_ids import pack

TOKENIZER = 7
IDS = pack([5, 6, 7])
LONG = pack(range(SHORT_IDS + 1))


def tokenize(*works: Tokenize, truncate: int | None = None) -> tuple[list[Tokenized], list[Tokenize]]:
    """Returns the answers and the tokenizer's input; its answer to every prompt is [1]."""
    links = FakeLinks(
        Member("g", Role.API_GATEWAY, 1, ""), member := Member("t", Role.TOKENIZER_POOL, TOKENIZER, "x", ready=True)
    )
    work = TokenizerClient(links)
    work.changed(member)

    async def run() -> list[Tokenized]:
        asked = asyncio.create_task(work.tokenize(list(works), "r", truncate))
        seen = 0
        while not asked.done():
            await asyncio.sleep(0)
            for _, frame in links.sent[seen:]:
                seen += 1
                assert isinstance(frame, Tokenize)
                work.answered(TOKENIZER, Tokenized(frame.request_id, pack([1]), b"n" * 16))
        return await asked

    answers = asyncio.run(run())
    return answers, [frame for _, frame in links.sent if isinstance(frame, Tokenize)]


def test_a_short_prompt_of_ids_is_seen_by_no_tokenizer() -> None:
    answers, seen = tokenize(Tokenize("", "m", token_ids=IDS), Tokenize("", "m", token_ids=pack([9])))
    assert answers == [Tokenized("r-0", IDS, b""), Tokenized("r-1", pack([9]), b"")]
    assert seen == []


def test_nor_is_what_is_left_of_it() -> None:
    answers, seen = tokenize(Tokenize("", "m", token_ids=IDS), truncate=2)
    assert answers == [Tokenized("r-0", pack([6, 7]), b"")] and seen == []


@pytest.mark.parametrize(
    "work",
    [
        Tokenize("", "m", text="abc"),
        Tokenize("", "m", token_ids=LONG),  # a scheduler would take long to hash its blocks
        Tokenize("", "m", token_ids=IDS, bad_words=["no"]),
        Tokenize("", "m", token_ids=IDS, want_text=True),
        Tokenize("", "m", token_ids=IDS, want_pieces=True),
        Tokenize("", "m", token_ids=IDS, grammar=Grammar(GrammarKind.REGEX, "a")),
    ],
)
def test_whatever_takes_one_goes_there(work: Tokenize) -> None:
    answers, seen = tokenize(work)
    assert [frame.request_id for frame in seen] == ["r-0"]
    assert answers == [Tokenized("r-0", pack([1]), b"n" * 16)]


def test_a_busy_tokenizer_is_a_429_and_other_rejections_are_not() -> None:
    async def run(code: str) -> RequestError:
        ring = Ring(TOKENIZER)
        future = ring.work.submit(Tokenize("r", "m", text="abc"))
        ring.work.answered(TOKENIZER, TextRejected("r", "grammar", "no", code))
        with pytest.raises(RequestError) as error:
            await future
        return error.value

    busy, other, failed = (asyncio.run(run(code)) for code in (BUSY, "", UNAVAILABLE))
    assert (failed.status, failed.field, failed.retry_after_s) == (503, "grammar", 1.0)
    assert (busy.status, busy.field, busy.retry_after_s) == (429, "grammar", 1.0)
    assert (other.status, other.field) == (400, "grammar")


class Ring:
    """A TokenizerClient between tokenizers that the test plays."""

    def __init__(self, *incarnations: int, check_wait_s: float = math.inf) -> None:
        members = [Member("t", Role.TOKENIZER_POOL, i, "x", ready=True) for i in incarnations]
        self.links = FakeLinks(Member("g", Role.API_GATEWAY, 1, ""), *members)
        self.work = TokenizerClient(self.links, check_wait_s)
        for member in members:
            self.work.changed(member)

    def lose(self, incarnation: int) -> None:
        self.work.gone(self.links.members[incarnation])

    async def refusal(self, *works: Tokenize, then: "Callable[[Ring], None]") -> RequestError:
        asked = asyncio.create_task(self.work.tokenize(list(works), "r"))
        await asyncio.sleep(0)
        then(self)
        with pytest.raises(RequestError) as error:
            await asked
        return error.value


def test_of_several_prompts_the_one_that_is_refused_is_named() -> None:
    texts = [Tokenize("", "m", text="abc"), Tokenize("", "m", text="far too long")]
    refused = TextRejected("r-1", "prompt", "too long", "context_length_exceeded")

    def refuse(ring: Ring) -> None:
        ring.work.answered(TOKENIZER, refused)

    error = asyncio.run(Ring(TOKENIZER).refusal(*texts, then=refuse))
    assert (error.field, error.code, error.status) == ("prompt[1]", "context_length_exceeded", 400)
    alone = TextRejected("r-0", "prompt", "too long", "context_length_exceeded")
    error = asyncio.run(Ring(TOKENIZER).refusal(texts[0], then=lambda ring: ring.work.answered(TOKENIZER, alone)))
    assert error.field == "prompt"


def test_a_text_that_several_tokenizers_were_lost_with_is_given_up() -> None:
    ring = Ring(*range(TOKENIZER, TOKENIZER + MAX_LOST + 1))

    def lose_all(ring: Ring) -> None:
        for _ in range(MAX_LOST):
            ring.lose(ring.links.sent[-1][0])

    error = asyncio.run(ring.refusal(Tokenize("", "m", text="abc"), then=lose_all))
    assert error.status == 500 and "lost" in str(error)
    assert [frame.request_id for _, frame in ring.links.sent if isinstance(frame, Tokenize)] == ["r-0"] * MAX_LOST


GOOD = Tokenize("", "m", text="abc", grammar=Grammar(GrammarKind.REGEX, "a+"))
BAD = Tokenize("", "m", text="abc", grammar=Grammar(GrammarKind.REGEX, "(a"))


def named(work: Tokenize, request_id: str) -> Tokenize:
    return msgspec.structs.replace(work, request_id=request_id)


async def asked_again(ring: Ring, work: Tokenize, answer: Tokenized | TextRejected) -> bool:
    """Whether a tokenizer is asked about this grammar, answered as given if so."""
    num_sent = len(ring.links.sent)
    future = ring.work.submit(named(work, answer.request_id))
    if len(ring.links.sent) > num_sent:
        ring.work.answered(ring.links.sent[-1][0], answer)
    await asyncio.wait([future])
    assert (future.exception() is None) == isinstance(answer, Tokenized)
    if isinstance(answer, TextRejected):
        assert isinstance(error := future.exception(), RequestError)
        assert (str(error), error.field, error.status) == (answer.message, "grammar", 400 if not answer.code else 429)
    return len(ring.links.sent) > num_sent


def test_a_grammar_that_is_known_to_be_bad_is_refused_without_a_tokenizer() -> None:
    async def run() -> None:
        ring, refused = Ring(TOKENIZER), TextRejected("r", "grammar", "unclosed group")
        assert [await asked_again(ring, BAD, refused) for _ in range(3)] == [True, False, False]
        other_model = msgspec.structs.replace(BAD, model="n")
        assert await asked_again(ring, other_model, refused)
        assert await asked_again(ring, GOOD, Tokenized("r", b"", b""))  # the tokenizer still makes its prompt's ids
        assert await asked_again(ring, GOOD, Tokenized("r", b"", b""))

    asyncio.run(run())


@pytest.mark.parametrize("code", [BUSY, "context_length_exceeded"])
def test_a_refusal_for_another_reason_is_not_kept(code: str) -> None:
    async def run() -> None:
        ring, field = Ring(TOKENIZER), "grammar" if code == BUSY else "prompt"
        for _ in range(2):
            future = ring.work.submit(named(BAD, "r"))
            ring.work.answered(TOKENIZER, TextRejected("r", field, "no", code))
            await asyncio.wait([future])
            assert future.exception() is not None
        assert len(ring.links.sent) == 2

    asyncio.run(run())


@pytest.mark.parametrize("what", ["tokenizer", "vocabulary"])
def test_verdicts_are_forgotten_with_the_tokenizers_and_the_vocabulary_that_they_are_of(what: str) -> None:
    scheduler = Member("s", Role.SCHEDULER, 5, "x", ready=True, card=ModelCard(["m"], "m", 64, 100, 0))
    new = {
        "tokenizer": Member("t", Role.TOKENIZER_POOL, 8, "x", ready=True),
        "vocabulary": msgspec.structs.replace(scheduler, card=ModelCard(["m"], "m", 64, 101, 0)),
    }[what]

    async def run() -> None:
        ring, refused = Ring(TOKENIZER), TextRejected("r", "grammar", "unclosed group")
        ring.work.changed(scheduler)
        assert await asked_again(ring, BAD, refused)
        for known in (scheduler, *ring.links.members.values()):
            ring.work.changed(msgspec.structs.replace(known, phase="ready"))
        assert not await asked_again(ring, BAD, refused)
        ring.work.changed(new)
        assert await asked_again(ring, BAD, refused)

    asyncio.run(run())


def checks(number: int) -> list[Tokenize]:
    return [msgspec.structs.replace(BAD, grammar=Grammar(GrammarKind.REGEX, f"(a{i}")) for i in range(number)]


def test_a_grammar_that_waits_too_long_for_its_check_is_refused_for_now() -> None:
    async def run() -> None:
        ring = Ring(TOKENIZER, check_wait_s=5.0)
        now = asyncio.get_running_loop().time()
        futures = [ring.work.submit(named(work, f"r{i}")) for i, work in enumerate(checks(5))]
        prompts = [ring.work.submit(Tokenize(f"p{i}", "m", text="abc")) for i in range(3)]
        assert [frame.request_id for _, frame in ring.links.sent] == ["r0", "r1", "p0", "p1"]
        ring.work.answered(TOKENIZER, TextRejected("r0", "grammar", "unclosed group"))
        for second in range(1, 7):
            assert [future.done() for future in futures] == [True, False, False, False, False]
            ring.work._served.heard(now + second)  # the checks of others
            ring.work.tick(now + second, 60.0)
        assert [future.done() for future in futures] == [True, False, False, True, True]  # one that runs is waited for
        assert not any(future.done() for future in prompts)
        error = futures[4].exception()
        assert isinstance(error, RequestError) and "new grammars wait" in str(error)
        assert (error.status, error.field, error.retry_after_s) == (429, "grammar", 5.0)
        await asyncio.sleep(0)
        ring.work.answered(TOKENIZER, TextRejected("r1", "grammar", "unclosed group"))
        assert len(ring.links.sent) == 5  # what was refused is not sent any more
        for future in (*futures[2:3], *prompts):
            future.cancel()
        assert all(future.exception() is not None for future in (*futures[:2], futures[3]))

    asyncio.run(run())


def test_a_grammar_does_not_wait_too_long_while_tokenizers_stand_still() -> None:
    async def run() -> None:
        ring = Ring(TOKENIZER, check_wait_s=5.0)
        now = asyncio.get_running_loop().time()
        futures = [ring.work.submit(named(work, f"r{i}")) for i, work in enumerate(checks(4))]
        for second in range(0, 30, 6):  # a few answers, with standstills between them
            ring.work._served.heard(now + second)
            ring.work.tick(now + second, 60.0)
        assert not any(future.done() for future in futures)
        ring.lose(TOKENIZER)
        ring.work.tick(now + 29.0, 60.0)
        assert not any(future.done() for future in futures)
        ring.work.tick(now + 31.0, 60.0)  # six times as long as they may wait for the checks of others
        assert not futures[0].done()  # without a tokenizer it waits for one
        for future in futures:
            future.cancel()

    asyncio.run(run())


def test_a_job_that_takes_long_waits_again_with_the_long_ones() -> None:
    async def run() -> None:
        ring = Ring(TOKENIZER)
        ring.work.submit(named(GOOD, "r")).add_done_callback(lambda future: future.exception())
        ring.work.answered(TOKENIZER, TextRejected("r", "grammar", "takes more than 0.25 s", TAKES_LONG))
        sent = [frame for _, frame in ring.links.sent]
        assert [isinstance(frame, Tokenize) and (frame.request_id, frame.quick) for frame in sent] == [
            ("r", True),
            ("r", False),
        ]
        ring.work.answered(TOKENIZER, TextRejected("r", "grammar", "takes more than 2 s"))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("work", "quick"),
    [
        (Tokenize("r", "m", text="abc"), True),
        (Tokenize("r", "m", text="x" * QUICK_BYTES + "x"), False),
        (Tokenize("r", "m", messages=b"[]"), True),
        (Tokenize("r", "m", messages=b"[]", chat_template="x"), False),
        (Tokenize("r", "m", messages=b"[]", tools=b"x" * QUICK_BYTES + b"x"), False),
        (Tokenize("r", "m", text="x", grammar=Grammar(GrammarKind.REGEX, "x" * 9000)), False),
        (Detokenize("r", "m", IDS), True),
    ],
)
def test_what_should_take_little_time_is_sent_as_quick(work: Tokenize | Detokenize, quick: bool) -> None:
    async def run() -> None:
        ring = Ring(TOKENIZER)
        future = ring.work.submit(msgspec.structs.replace(work, tenant="key-3"))
        (sent,) = [frame for _, frame in ring.links.sent if isinstance(frame, Tokenize | Detokenize)]
        assert (sent.quick, sent.tenant) == (quick, "key-3")
        future.cancel()

    asyncio.run(run())


def test_a_text_does_not_wait_for_the_many_texts_of_other_calls() -> None:
    links = FakeLinks(
        Member("g", Role.API_GATEWAY, 1, ""), member := Member("t", Role.TOKENIZER_POOL, TOKENIZER, "x", ready=True)
    )
    work = TokenizerClient(links)
    work.changed(member)

    async def run() -> None:
        many = ["a" * 100] * (BRIEF_CHARS // 100 + 1)
        jobs = [TokenizeTexts(f"many-{i}", "m", many, [], 512) for i in range(3 * MAX_WAITING)]
        for job in [*jobs, TokenizeTexts("one", "m", ["a text"], [], 512)]:
            work.submit(job)

    asyncio.run(run())
    assert [frame.request_id for _, frame in links.sent] == [*(f"many-{i}" for i in range(MAX_WAITING)), "one"]

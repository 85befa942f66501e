"""Prompts that need a tokenizer, and prompts that are returned without one."""

import asyncio
from collections.abc import Callable

import pytest
from fake_links import FakeLinks

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import BUSY, Grammar, GrammarKind, Member, Role, TextRejected, Tokenize, Tokenized
from blockyard.shared.ring_client.tokenizer_client import SHORT_IDS, TokenizerClient
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

    busy, other = asyncio.run(run(BUSY)), asyncio.run(run(""))
    assert (busy.status, busy.field, busy.retry_after_s) == (429, "grammar", 1.0)
    assert (other.status, other.field) == (400, "grammar")


class Ring:
    """A TokenizerClient between tokenizers that the test plays."""

    def __init__(self, *incarnations: int) -> None:
        members = [Member("t", Role.TOKENIZER_POOL, i, "x", ready=True) for i in incarnations]
        self.links = FakeLinks(Member("g", Role.API_GATEWAY, 1, ""), *members)
        self.work = TokenizerClient(self.links)
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


def test_a_text_that_two_tokenizers_were_lost_with_is_given_up() -> None:
    ring = Ring(TOKENIZER, 8, 9)

    def lose_two(ring: Ring) -> None:
        for _ in range(2):
            ring.lose(ring.links.sent[-1][0])

    error = asyncio.run(ring.refusal(Tokenize("", "m", text="abc"), then=lose_two))
    assert error.status == 500 and "lost" in str(error)
    assert [frame.request_id for _, frame in ring.links.sent if isinstance(frame, Tokenize)] == ["r-0", "r-0"]

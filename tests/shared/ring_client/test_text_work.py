"""Which prompts a tokenizer sees, and that the others come back as they are."""

import asyncio

import pytest

from blockyard.shared.fake_links import FakeLinks
from blockyard.shared.messages import Member, Role, Tokenize, Tokenized
from blockyard.shared.ring_client.text_work import SHORT_IDS, TextWork
from blockyard.shared.token_ids import pack

TOKENIZER = 7
IDS = pack([5, 6, 7])
LONG = pack(range(SHORT_IDS + 1))


def tokenize(*works: Tokenize, truncate: int | None = None) -> tuple[list[Tokenized], list[Tokenize]]:
    """The answers, and what the tokenizer got; it says of every prompt that it is [1]."""
    links = FakeLinks(
        Member("g", Role.API_GATEWAY, 1, ""), member := Member("t", Role.TOKENIZER_POOL, TOKENIZER, "x", ready=True)
    )
    work = TextWork(links)
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
        Tokenize("", "m", token_ids=LONG),  # a scheduler would be long at its names
        Tokenize("", "m", token_ids=IDS, bad_words=["no"]),
        Tokenize("", "m", token_ids=IDS, want_text=True),
        Tokenize("", "m", token_ids=IDS, want_pieces=True),
    ],
)
def test_whatever_takes_one_goes_there(work: Tokenize) -> None:
    answers, seen = tokenize(work)
    assert [frame.request_id for frame in seen] == ["r-0"]
    assert answers == [Tokenized("r-0", pack([1]), b"n" * 16)]

"""The detokenizer's loop: one batch per gateway and step, stops to the scheduler, lost peers."""

import struct

import pytest
from fake_links import FakeLinks
from tokenizers import Tokenizer

from blockyard.services.detokenizer.service import Detokenizer
from blockyard.services.detokenizer.token_table import TokenTable
from blockyard.shared.bus.member_list import Changed, Gone, Joined
from blockyard.shared.messages import (
    FinishReason,
    Member,
    ModelCard,
    PathLost,
    Role,
    Stop,
    StreamOpen,
    StreamRef,
    TextBatch,
    TextOptions,
    TokenBatch,
    TokenStep,
)

SCHEDULER = 7
GATEWAYS = (11, 12)


@pytest.fixture
def links() -> FakeLinks:
    me = Member("detokenizer", Role.DETOKENIZER, 1, "ipc://x")
    return FakeLinks(me, *(Member(f"gateway {g}", Role.API_GATEWAY, g, "ipc://y") for g in GATEWAYS))


@pytest.fixture
def detokenizer(links: FakeLinks, byte_tokenizer: Tokenizer) -> Detokenizer:
    return Detokenizer(links, TokenTable(byte_tokenizer, byte_tokenizer.get_vocab_size()), ["m"])


def opened(name: str, gateway: int, options: TextOptions | None = None) -> StreamOpen:
    return StreamOpen(name, 1, 0, gateway, struct.pack("<I", 0), b"", 0, options or TextOptions())


def step(name: str, token_id: int, first: int = 0) -> TokenStep:
    return TokenStep(name, 1, 0, first, [token_id])


def test_one_batch_a_gateway(links: FakeLinks, detokenizer: Detokenizer) -> None:
    opens = [opened("a", 11), opened("b", 12), opened("c", 11)]
    detokenizer.handle(SCHEDULER, TokenBatch(opens, [step(name, 40) for name in "abc"], stamp_s=12.5))
    assert [(to, type(frame)) for to, frame in links.sent] == [(11, TextBatch), (12, TextBatch)]
    first = links.sent[0][1]
    assert isinstance(first, TextBatch)
    assert ([d.request_id for d in first.deltas], first.stamp_s) == (["a", "c"], 12.5)
    detokenizer.count()
    assert (links.me.stats.running, links.me.stats.output_tokens_total, links.me.stats.steps_total) == (3, 3, 1)


def test_stop_goes_back_to_the_scheduler(links: FakeLinks, detokenizer: Detokenizer, byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("x", add_special_tokens=False).ids
    detokenizer.handle(SCHEDULER, TokenBatch([opened("a", 11, TextOptions(stop=["x"]))], [step("a", ids[0])]))
    assert links.answered == [(SCHEDULER, Stop([StreamRef("a", 1, 0)]))]
    frame = links.sent[0][1]
    assert isinstance(frame, TextBatch)
    assert (frame.deltas[0].finish, frame.deltas[0].stop_reason) == (FinishReason.STOP, "x")


def test_gateways_that_vanish(links: FakeLinks, detokenizer: Detokenizer) -> None:
    detokenizer.handle(SCHEDULER, TokenBatch([opened("a", 11), opened("b", 12)], []))
    detokenizer.handle(11, Gone(links.members[11]))
    assert detokenizer.streams.num_open == 1
    links.full.add(12)
    detokenizer.handle(SCHEDULER, TokenBatch([], [step("a", 40), step("b", 40)]))
    assert detokenizer.streams.num_open == 0
    assert links.sent == []
    assert links.answered == [(SCHEDULER, PathLost(12))]


def test_every_scheduler_is_told_which_gateway_is_unreachable(links: FakeLinks, detokenizer: Detokenizer) -> None:
    """Also a scheduler with streams that were dropped with the batch or have just ended."""
    detokenizer.handle(8, TokenBatch([opened("a", 11)], []))
    detokenizer.handle(SCHEDULER, TokenBatch([opened("b", 11)], []))
    del links.members[11]
    end = TokenStep("b", 1, 0, 0, [40], FinishReason.LENGTH)
    detokenizer.handle(SCHEDULER, TokenBatch([], [end]))
    assert sorted(links.answered) == [(SCHEDULER, PathLost(11)), (8, PathLost(11))]


def test_the_models_padding_ids_are_silent(links: FakeLinks, detokenizer: Detokenizer) -> None:
    other = ModelCard(["other"], "", 10, 10**6, 0)
    detokenizer.handle(SCHEDULER, Joined(Member("s", Role.SCHEDULER, 8, "ipc://z", card=other)))
    detokenizer.handle(SCHEDULER, TokenBatch([opened("a", 11)], [step("a", 1000)]))
    ours = ModelCard(["m"], "", 10, 1024, 0)
    detokenizer.handle(SCHEDULER, Changed(Member("s", Role.SCHEDULER, SCHEDULER, "ipc://z", card=ours)))
    detokenizer.handle(SCHEDULER, TokenBatch([opened("b", 11)], [step("b", 1000)]))
    finishes = [frame.deltas[0].finish for _, frame in links.sent if isinstance(frame, TextBatch)]
    assert finishes == [FinishReason.FAILED, None]

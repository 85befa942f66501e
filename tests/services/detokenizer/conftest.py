"""A detokenizer's state without its loop."""

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

from blockyard.services.detokenizer.streams import TextStreams
from blockyard.services.detokenizer.token_table import TokenTable
from blockyard.shared.messages import StreamOpen, StreamRef, TextDelta, TextOptions, TokenBatch, TokenStep

SCHEDULER, GATEWAY = 77, 99


class Bench:
    """One detokenizer's state, fed batch by batch."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.streams = TextStreams(TokenTable(tokenizer, tokenizer.get_vocab_size()))
        self.deltas: list[TextDelta] = []
        self.stops: list[StreamRef] = []

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def open(self, name: str = "r", attempt: int = 1, choice: int = 0, **fields: Any) -> None:
        options = TextOptions(**{k: fields.pop(k) for k in list(fields) if k in TextOptions.__struct_fields__})
        values: dict[str, Any] = {"context_ids": b"", "output_ids": b"", "chars_sent": 0, "gateway": GATEWAY}
        values |= fields
        self.apply(TokenBatch([StreamOpen(name, attempt, choice, options=options, **values)], []))

    def step(
        self, first: int, ids: list[int], name: str = "r", attempt: int = 1, choice: int = 0, **fields: Any
    ) -> None:
        self.apply(TokenBatch([], [TokenStep(name, attempt, choice, first, ids, **fields)]))

    def apply(self, batch: TokenBatch, scheduler: int = SCHEDULER) -> None:
        outcome = self.streams.apply(scheduler, batch)
        for deltas in outcome.deltas.values():
            self.deltas.extend(deltas)
        self.stops.extend(outcome.stops)

    def restart(self) -> None:
        """Replaces the detokenizer by a new one."""
        self.streams = TextStreams(TokenTable(self.tokenizer, self.tokenizer.get_vocab_size()))

    @property
    def text(self) -> str:
        return "".join(d.text for d in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [i for d in self.deltas for i in d.token_ids]


@pytest.fixture
def bench(byte_tokenizer: Tokenizer) -> Bench:
    return Bench(byte_tokenizer)


@pytest.fixture(scope="session")
def bench_of() -> Callable[[Tokenizer], Bench]:
    return Bench

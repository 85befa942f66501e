"""Requests with many prompts: what a gateway has of their results, which have to be those of an undisturbed run."""

from array import array
from dataclasses import dataclass, field

import msgspec

from blockyard.shared.messages import Pool, PoolingCard, PoolingTask, Refused, VectorBlock

WIDTH = 3


def card_of(kind: str, max_len: int) -> PoolingCard | None:
    """kind: "encoder", "last" or "mean", the poolings of a decoder; "": the model generates text."""
    if not kind:
        return None
    return PoolingCard(
        PoolingTask.EMBED, WIDTH, max_len, pooling="LAST" if kind == "last" else "MEAN", has_kv=kind != "encoder"
    )


def vector_of(prompt: list[int]) -> bytes:
    """The mock worker's."""
    return array("f", [prompt[-1 - i % len(prompt)] for i in range(WIDTH)]).tobytes()


def pool_frame(name: str, prompts: dict[int, list[int]], attempt: int = 0, **more: object) -> Pool:
    """prompts: by index."""
    return Pool(
        name,
        attempt,
        "m",
        array("I", [token for prompt in prompts.values() for token in prompt]).tobytes(),
        array("I", map(len, prompts.values())).tobytes(),
        array("I", prompts).tobytes(),
        **more,
    )


@dataclass
class PoolJournal:
    """A strict reader: no result comes twice in an attempt, and each is that of its prompt."""

    prompts: dict[int, list[int]]
    frame: Pool
    results: dict[int, bytes] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    seen: set[tuple[int, int]] = field(default_factory=set)  # attempts and indexes
    num_accepted: int = 0  # times, in this attempt
    cancelled: bool = False
    refused: Refused | None = None

    def missing(self) -> dict[int, list[int]]:
        done = self.results.keys() | self.failures.keys()
        return {index: prompt for index, prompt in self.prompts.items() if index not in done}

    def is_open(self) -> bool:
        return not self.cancelled and self.refused is None and not self.failures and bool(self.missing())

    def again(self) -> Pool:
        missing = self.missing()
        columns = pool_frame("", missing)
        self.num_accepted = 0
        self.frame = msgspec.structs.replace(
            self.frame,
            attempt=self.frame.attempt + 1,
            token_ids=columns.token_ids,
            lengths=columns.lengths,
            indexes=columns.indexes,
        )
        return self.frame

    def read(self, block: VectorBlock) -> None:
        indexes, lengths = array("I", block.indexes), array("I", block.lengths)
        assert len(block.data) == 4 * sum(lengths)
        for index in [*indexes, *(failure.index for failure in block.failures)]:
            assert (block.attempt, index) not in self.seen, f"{block.request_id}[{index}] has two results"
            self.seen.add((block.attempt, index))
        if self.cancelled or block.attempt != self.frame.attempt:
            return
        assert self.refused is None and self.num_accepted, "a result before the answer"
        end = 0
        for index, length in zip(indexes, lengths, strict=True):
            first, end = end, end + 4 * length
            assert block.data[first:end] == vector_of(self.prompts[index])
            assert index not in self.results, "it was there already"
            self.results[index] = block.data[first:end]
        self.failures |= {failure.index: failure.detail for failure in block.failures}

    def check_ended(self, max_model_len: int) -> None:
        """A prompt fails with its workers, or because it was taken before a worker had said how long it may be."""
        if self.cancelled or self.refused is not None:
            return
        assert not self.missing() or self.failures, f"{self.frame.request_id} never ended"
        for index, detail in self.failures.items():
            too_long = len(self.prompts[index]) > max_model_len
            assert too_long or detail.startswith("workers broke"), f"{self.frame.request_id}[{index}]: {detail}"

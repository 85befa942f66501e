"""Slices of texts: what steps take, what returns, and what a new attempt leaves waiting."""

from array import array

from blockyard.services.scheduler.sequences.packed_texts import PackedTexts, TextSlice
from blockyard.shared.messages import Pool

LENGTHS = [3, 1, 4, 1, 5]


def frame(indexes: list[int]) -> Pool:
    ids = array("I", [10 * i + place for i in indexes for place in range(LENGTHS[i])])
    lengths, listed = array("I", [LENGTHS[i] for i in indexes]), array("I", indexes)
    return Pool("p", 0, "m", ids.tobytes(), lengths.tobytes(), listed.tobytes(), second_starts=listed.tobytes())


def listed(texts: TextSlice | None) -> list[int] | None:
    return None if texts is None else texts.indexes.tolist()


def test_a_step_takes_whole_texts_in_order() -> None:
    texts = PackedTexts(frame([0, 1, 2, 3, 4]))
    assert (texts.num_texts, texts.num_tokens) == (5, 14)
    first = texts.take(7, 7)
    assert first is not None and listed(first) == [0, 1] and first.num_tokens == 4
    assert array("I", first.token_ids).tolist() == [0, 1, 2, 10]
    assert array("I", first.lengths).tolist() == [3, 1]
    assert array("I", first.second_starts).tolist() == [0, 1]
    assert listed(texts.take(3, 3)) is None, "the next text has 4 tokens"
    assert listed(texts.take(3, 4)) == [2], "one longer text, if the step has room"
    assert listed(texts.take(1)) == [3]
    assert listed(texts.take(1)) == [4], "an empty step takes a text of any length"
    assert (texts.num_texts, texts.num_tokens, texts.is_empty) == (0, 0, False)


def test_lost_texts_wait_before_others() -> None:
    texts = PackedTexts(frame([0, 1, 2]))
    first, second = texts.take(3), texts.take(1)
    assert first is not None and second is not None
    texts.finish(second)
    texts.put_back(first)
    assert (texts.num_texts, texts.num_tokens) == (2, 7)
    assert listed(texts.take(100)) == [0], "a slice ends where its neighbours are gone"
    assert listed(texts.take(100)) == [2]


def test_a_new_attempt_leaves_what_runs() -> None:
    texts = PackedTexts(frame([0, 1, 2, 3, 4]))
    running = texts.take(4)
    assert listed(running) == [0, 1]
    middle = texts.take(4)
    assert listed(middle) == [2]
    texts.set_frame(frame([1, 2, 3, 4, 0]))
    assert (texts.num_texts, texts.num_tokens) == (2, 6)
    assert listed(texts.take(100)) == [3, 4]
    assert not texts.num_texts

"""Text that arrives in pieces is read as if it were there as a whole, also after going back."""

import random
import tracemalloc

import pytest

from blockyard.shared.output_parsing.text_input import TextInput


@pytest.mark.parametrize("seed", range(60))
def test_going_back_finds_the_same_text(seed: int) -> None:
    """Random reads, places to go back to, and arrivals, against positions in the whole text."""
    draw = random.Random(seed)
    whole = "".join(chr(ord("a") + draw.randrange(26)) for _ in range(400))
    text, arrived, at, places = TextInput(), 0, 0, list[tuple[int, int]]()
    for _ in range(600):
        match draw.randrange(5):
            case 0:
                size = draw.randint(1, 9)
                text.add(whole[arrived : arrived + size])
                arrived = min(len(whole), arrived + size)
            case 1:
                count = draw.randint(0, 6)
                shown = text.unread(count)
                assert shown == whole[at : min(at + count, arrived)]
                text.skip(len(shown))
                at += len(shown)
            case 2:
                places.append((text.keep(), at))
            case 3 if places:
                place, at = places.pop()
                text.rewind(place)
            case 4 if places:
                places.pop()
                text.release()
        assert text.unread(1000) == whole[at:arrived]
    text.end()
    assert text.ended is (at == arrived)


def test_kept_text_is_not_copied_at_every_arrival() -> None:
    text, long = TextInput(), "ab" * 500_000
    text.add(long)
    place = text.keep()
    tracemalloc.start()
    for _ in range(1000):
        text.skip(len(text.unread(len(long))))
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        text.add("xyz")
        assert tracemalloc.get_traced_memory()[1] < before + 10_000
    tracemalloc.stop()
    text.rewind(place)
    assert text.unread(2 * len(long)) == long + "xyz" * 1000

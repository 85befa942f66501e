"""Stop strings are found if and only if they are in the text, for any division into pushes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.services.detokenizer.stream import StopFinder

letters = st.text("abc", max_size=14)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Brute force: the shortest prefix of the text that ends in a stop string, and the longest such string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def fed(finder: StopFinder, chunks: list[str]) -> str:
    shown = ""
    for chunk in chunks:
        shown += finder.push(chunk)
        if finder.found is not None:
            break
    return shown + finder.flush()


@given(chunks=st.lists(letters, max_size=8), stops=stop_lists, include=st.booleans())
def test_found_iff_in_the_text(chunks: list[str], stops: list[str], include: bool) -> None:
    finder = StopFinder(stops, include)
    assert (fed(finder, chunks), finder.found) == expected("".join(chunks), stops, include)


@pytest.mark.parametrize("stops", [["b", "ab", "cab"], ["cab", "ab", "b"], ["ab", "cab", "b"]])
@pytest.mark.parametrize("chunks", [["xcab"], ["x", "c", "a", "b"], ["xca", "b!"]])
@pytest.mark.parametrize(("include", "shown"), [(False, "x"), (True, "xcab")])
def test_of_stop_strings_that_end_together_the_longest_counts(
    stops: list[str], chunks: list[str], include: bool, shown: str
) -> None:
    finder = StopFinder(stops, include)
    assert (fed(finder, chunks), finder.found) == (shown, "cab")


@given(chunks=st.lists(letters, max_size=8), stops=stop_lists)
def test_holds_back_no_more_than_could_be_a_stop(chunks: list[str], stops: list[str]) -> None:
    finder = StopFinder(stops, False)
    shown = text = ""
    for chunk in chunks:
        text += chunk
        shown += finder.push(chunk)
        if finder.found is not None:
            return
        held = text[len(shown) :]
        assert text == shown + held
        assert not held or any(stop.startswith(held) for stop in stops)


@given(before=letters, after=letters, stops=stop_lists)
def test_stop_strings_in_unchecked_text_do_not_count(before: str, after: str, stops: list[str]) -> None:
    """A stop string counts if it ends in checked text, even when it began before."""
    finder = StopFinder(stops, False)
    shown = finder.push(before, check=False)
    assert finder.found is None
    shown += finder.push(after)
    text = before + after
    ends = [end for end in range(len(before) + 1, len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    assert (finder.found is not None) == bool(ends)
    if finder.found is not None:
        assert shown == text[: min(ends) - len(finder.found)]
    else:
        assert shown + finder.flush() == text


def test_a_stop_string_that_does_not_count_is_shown_at_once() -> None:
    assert StopFinder(["xy", "abc"], False).push("xy", check=False) == "xy"
    assert StopFinder(["xyx"], False).push("xyx", check=False) == "xy"  # the last x may begin another match

"""The pages of adapters on a device: where matrices lie, who has which, and who loses them."""

from hypothesis import given
from hypothesis import strategies as st

from blockyard.services.gpu_worker.lora.device.adapter_pages import AdapterPages, PageLayout, aligned

PAGE, PLACES, PAGES = 80, 3, 3  # elements of a page; pages of the largest adapter
COUNTS = st.integers(0, PAGE - 10)


@given(st.lists(st.tuples(COUNTS, COUNTS), max_size=40))
def test_smaller_matrices_take_no_more_pages(counts: list[tuple[int, int]]) -> None:
    small, large = PageLayout(PAGE), PageLayout(PAGE)
    for pair in counts:
        small.add(min(pair))
        large.add(max(pair))
    assert small.num_pages <= large.num_pages


@given(st.lists(st.integers(1, PAGE), max_size=40))
def test_no_matrix_crosses_a_page_or_covers_another(counts: list[int]) -> None:
    layout, end = PageLayout(PAGE), 0
    for count in counts:
        first = layout.add(count)
        assert first >= end and first == aligned(first)
        assert first // PAGE == (first + count - 1) // PAGE
        end = first + count
    assert layout.num_pages == -(-end // PAGE)


@given(st.lists(st.tuples(st.integers(0, PLACES - 1), st.integers(0, 9)), max_size=60))
def test_places_keep_the_pages_of_their_adapters(history: list[tuple[int, int]]) -> None:
    pages, written = AdapterPages(PLACES * PAGES), dict[int, int]()
    placed, held = dict[int, int](), dict[int, list[int]]()
    for place, adapter in history:
        own, has_bytes = pages.place(place, bytes([adapter]), 1 + adapter % PAGES)
        assert len(set(own)) == 1 + adapter % PAGES and set(own) <= set(range(PLACES * PAGES))
        if has_bytes:
            assert held[adapter] == own and all(written[page] == adapter for page in own)
        written |= dict.fromkeys(own, adapter)
        placed[place], held[adapter] = adapter, own
        for other in placed.values():
            assert all(written[page] == other for page in held[other])


def test_those_without_a_place_stay_while_there_is_room() -> None:
    pages, num = AdapterPages(PLACES * PAGES), PLACES * PAGES
    for adapter in range(num):
        assert not pages.place(0, bytes([adapter]), 1)[1]
    assert pages.num_held == num and pages.place(0, bytes([1]), 1)[1]
    pages.place(0, bytes([num]), 1)  # in the page of the first, which was placed least recently
    assert pages.place(0, bytes([1]), 1)[1] and not pages.place(0, bytes([0]), 1)[1]
    pages.place(1, bytes([20]), PAGES)
    assert pages.num_held == num - PAGES + 1

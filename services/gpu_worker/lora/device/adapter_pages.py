"""The pages of a device's memory that adapters have, and where matrices lie in pages.

A page is the unit of memory: an adapter has as many as its matrices fill, whatever a place may hold at most. An adapter
that has lost its places keeps its pages until others need them, and comes back to a place without a copy. So memory for
some places of the largest adapters has many small ones.
"""

from blockyard.kernels.lora.adapter_table import ALIGNED


class PageLayout:
    """Lays matrices into pages of equal size, one behind the other, so that none crosses the end of a page.

    Smaller or fewer matrices in the same order never take more pages, because a matrix that begins a page does so only
    if the page before has no room for it (next fit).
    """

    def __init__(self, page_size: int) -> None:
        """page_size: elements."""
        self.page_size = page_size
        self._end = 0

    def add(self, count: int) -> int:
        """Returns the first element of a matrix with so many, counted from the begin of the first page."""
        size, used = aligned(count), self._end % self.page_size
        if used and used + size > self.page_size:
            self._end += self.page_size - used
        first = self._end
        self._end += size
        return first

    @property
    def num_pages(self) -> int:
        return -(-self._end // self.page_size)

    @property
    def size(self) -> int:
        """Elements of all pages."""
        return self.num_pages * self.page_size


class AdapterPages:
    """Which adapter has which pages, by digest."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages))
        self._held: dict[bytes, list[int]] = {}  # the adapter that was placed least recently is first
        self._placed: dict[int, bytes] = {}  # by place

    @property
    def num_held(self) -> int:
        """Adapters."""
        return len(self._held)

    def place(self, place: int, digest: bytes, count: int) -> tuple[list[int], bool]:
        """Gives a place an adapter of so many pages. Returns these, and whether they have its bytes already.

        No step in flight may read the place. In each place there must be room for as many pages.
        """
        self._placed.pop(place, None)
        pages = self._held.pop(digest, None)
        has_bytes = pages is not None
        if pages is None:
            self._make_room(count)
            pages = [self._free.pop() for _ in range(count)]
        assert len(pages) == count, f"{count} pages of an adapter that had {len(pages)}"
        self._held[digest], self._placed[place] = pages, digest
        return pages, has_bytes

    def _make_room(self, count: int) -> None:
        placed = set(self._placed.values())
        for digest in [one for one in self._held if one not in placed]:
            if len(self._free) >= count:
                break
            self._free += self._held.pop(digest)
        assert len(self._free) >= count, f"{count} pages needed, {len(self._free)} free"


def aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED

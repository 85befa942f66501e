"""What programs find out about the experts of few rows by themselves, so that no kernel maps them before.

An expert is at most once among the experts of a row. So the pairs of an expert fit a tile with one place a row, and a
program that looks at all pairs knows which of them are its own. The tile of an expert belongs to its first pair.
"""

import triton
import triton.language as tl

MAX_ROWS = 16  # the fewest columns of a product on tensor cores


@triton.jit
def own_pairs(experts_ptr, first, num_pairs, TOP_K: tl.constexpr, K_TILE: tl.constexpr, TILE: tl.constexpr):
    """The expert of pair `first` and its pair in each of TILE rows, `num_pairs` in rows without one.

    The expert is -1 if an earlier pair has it.
    """
    k = tl.arange(0, K_TILE)[None, :]
    pair = tl.arange(0, TILE)[:, None] * TOP_K + k
    inside = (pair < num_pairs) & (k < TOP_K)
    expert = tl.load(experts_ptr + first)
    mine = (tl.load(experts_ptr + pair, mask=inside, other=-1) == expert) & inside
    pairs = tl.min(tl.where(mine, pair, num_pairs), 1)
    return tl.where(tl.min(pairs, 0) == first, expert, -1), pairs


@triton.jit
def store_loads(experts_ptr, loads_ptr, num_pairs, EXPERTS: tl.constexpr, BINS: tl.constexpr, PAIRS: tl.constexpr):
    """The first program stores how many of the pairs each expert has; PAIRS: at least their number."""
    if tl.program_id(0) + tl.program_id(1) == 0:
        pair = tl.arange(0, PAIRS)
        expert = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=BINS - 1)
        bins = tl.arange(0, BINS)
        tl.store(loads_ptr + bins, tl.histogram(expert, BINS), mask=bins < EXPERTS)


@triton.jit
def tile_pairs(
    owners_ptr, pairs_ptr, tile, num_pairs, TOP_K: tl.constexpr, K_TILE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The expert and the pairs of a tile: of a map, or with TOP_K by `own_pairs`, and `owners_ptr` has the experts."""
    if TOP_K:
        return own_pairs(owners_ptr, tile, num_pairs, TOP_K, K_TILE, TILE)
    else:  # noqa: RET505, only one branch is compiled
        return tl.load(owners_ptr + tile), tl.load(pairs_ptr + tile * TILE + tl.arange(0, TILE))

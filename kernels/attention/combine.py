"""Combines the splits of split-KV attention (flash decoding): each split's output is weighted by its log-sum-exp.

- `combine_splits_kernel`: after `paged_decode` of few rows and `latent_decode`, programs of some heads of a row each.
- `combine_if_last`: for many rows, in `paged_decode` itself: the last program of a row's and K/V head's splits to
  finish combines them.
- `combine_prefill_kernel`: after `paged_prefill`, one program a token and head, all splits at once.

All add the sinks of heads, if a layer has any, when they have added the splits up.

`fused_decode_lanes` has its own function for one head, `paged_decode_fp8` its own `combine_if_last` in Gluon, and
`batch_invariant` combines in a fixed order. The six differ in the order of their sums, the layout of the splits or the
language, so none can stand in for another.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.attention.attention_tiles import add_sinks
from blockyard.kernels.int_math import next_power_of_2

_COMBINED_ELEMENTS = 4096  # elements of splits that the last program loads at once


@triton.jit(do_not_specialize=["rows", "of_program"], do_not_specialize_on_alignment=["out_ptr"])
def combine_splits_kernel(
    row_splits_ptr, partial_out_ptr, lse_ptr, out_ptr, rows, of_program,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, sinks_ptr=None,
    PDL: tl.constexpr = False,
):  # fmt: skip
    # program (i, j, k): dims k * DIM to (k + 1) * DIM - 1 of heads j * of_program ... of row i
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, first_head = tl.program_id(0), tl.program_id(1) * of_program
    first_split = tl.load(row_splits_ptr + row)
    num_splits = tl.load(row_splits_ptr + rows + row)
    if num_splits == 1:
        return
    dims = tl.program_id(2) * DIM + tl.arange(0, DIM)
    in_head = dims < HEAD_DIM
    for head in range(first_head, tl.minimum(first_head + of_program, HEADS)):
        m_i = float("-inf")
        l_i = 0.0
        acc = tl.zeros([DIM], tl.float32)
        for start in range(0, num_splits, SPLITS):
            split = start + tl.arange(0, SPLITS)
            split_head = (first_split + split).to(tl.int64) * HEADS + head
            lse = tl.load(lse_ptr + split_head, mask=split < num_splits, other=float("-inf"))
            values = tl.load(
                partial_out_ptr + split_head[:, None] * HEAD_DIM + dims[None, :],
                mask=(split < num_splits)[:, None] & in_head[None, :],
                other=0.0,
            )
            m_new = tl.maximum(m_i, tl.max(lse, 0))
            alpha = tl.exp2(m_i - m_new)
            p = tl.exp2(lse - m_new)
            l_i = l_i * alpha + tl.sum(p, 0)
            acc = acc * alpha + tl.sum(values * p[:, None], 0)
            m_i = m_new
        l_i = add_sinks(l_i, m_i, sinks_ptr, head, 1, HEADS)
        tl.store(out_ptr + (row.to(tl.int64) * HEADS + head) * HEAD_DIM + dims, acc / l_i, mask=in_head)


@triton.jit
def is_last_split(semaphore_ptr, num_splits):
    """Whether this program is the last of `num_splits` to have stored its split. The caller resets the counter."""
    tl.debug_barrier()  # the stores of all threads of this program come before its count
    return tl.atomic_add(semaphore_ptr, 1, sem="acq_rel", scope="gpu") == num_splits - 1


@triton.jit
def combine_if_last(
    row, head, num_splits, row_splits_ptr, semaphores_ptr, partial_out_ptr, lse_ptr, out_ptr, sinks_ptr, rows,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """If this program is the last of a row's and K/V head's splits, combines all of them, SPLITS at a time."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    semaphore = semaphores_ptr + head * rows + row
    if is_last_split(semaphore, num_splits):
        tl.debug_barrier()
        first_split = tl.load(row_splits_ptr + row)
        group, dims = tl.arange(0, triton.next_power_of_2(GROUP)), tl.arange(0, DIM)
        heads, in_head = head * GROUP + group, dims < HEAD_DIM
        m_i = tl.full(heads.shape, float("-inf"), tl.float32)
        l_i = tl.zeros(heads.shape, tl.float32)
        acc = tl.zeros([heads.shape[0], DIM], tl.float32)
        for start in range(0, num_splits, SPLITS):
            split = start + tl.arange(0, SPLITS)
            split_head = (first_split + split).to(tl.int64)[:, None] * HEADS + heads[None, :]
            valid = (split < num_splits)[:, None] & (group < GROUP)[None, :]
            lse = tl.load(lse_ptr + split_head, mask=valid, other=float("-inf"), cache_modifier=".cg")
            inside = valid[:, :, None] & in_head[None, None, :]
            places = partial_out_ptr + split_head[:, :, None] * HEAD_DIM + dims[None, None, :]
            values = tl.load(places, mask=inside, other=0.0, cache_modifier=".cg")
            m_new = tl.maximum(tl.maximum(m_i, tl.max(lse, 0)), -3e38)  # padding heads have no splits
            alpha = tl.exp2(m_i - m_new)
            p = tl.exp2(lse - m_new[None, :])
            l_i = l_i * alpha + tl.sum(p, 0)
            acc = acc * alpha[:, None] + tl.sum(values * p[:, :, None], 0)
            m_i = m_new
        l_i = add_sinks(l_i, m_i, sinks_ptr, heads, 1, HEADS)
        acc = acc / tl.where(l_i > 0, l_i, 1.0)[:, None]
        columns = (row * HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_ptr + columns, acc, mask=(group < GROUP)[:, None] & in_head[None, :])
        tl.store(semaphore, 0)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["out_ptr"])
def combine_prefill_kernel(
    partial_out_ptr, lse_ptr, out_ptr, num_splits,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, MAX_SPLITS: tl.constexpr, sinks_ptr=None,
):  # fmt: skip
    # program i: one token and head
    out_row = tl.program_id(0).to(tl.int64)
    split, dims = tl.arange(0, MAX_SPLITS), tl.arange(0, DIM)
    in_head = dims < HEAD_DIM
    lse = tl.load(lse_ptr + out_row * num_splits + split, mask=split < num_splits, other=float("-inf"))
    m_i = tl.max(lse, 0)
    lse = tl.exp2(lse - tl.where(m_i == float("-inf"), 0.0, m_i))
    l_i = add_sinks(tl.sum(lse, 0), m_i, sinks_ptr, tl.program_id(0) % HEADS, 1, HEADS)
    values = tl.load(
        partial_out_ptr + (out_row * num_splits + split)[:, None] * HEAD_DIM + dims[None, :],
        mask=(lse > 0)[:, None] & in_head[None, :],  # a split without keys has stored no output
        other=0.0,
    )
    acc = tl.sum(values * lse[:, None], 0) / tl.where(l_i > 0, l_i, 1.0)
    tl.store(out_ptr + out_row * HEAD_DIM + dims, acc, mask=in_head)


def splits_at_once(group: int, dim: int) -> int:
    """How many splits the last program loads at a time."""
    return max(_COMBINED_ELEMENTS // (dim * next_power_of_2(group)), 1)

"""`paged_decode` over a KV cache in 8-bit floats, in Gluon, for Hopper GPUs, which convert pairs of them to float16.

Split-KV as in `paged_decode`, with its schedule. K, V and p are multiplied in float16, which represents each 8-bit
number exactly, and added up in float32; the scales of K and V are factors of a split. `decode_fp8_tiles` says how a
warp attends to its keys.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.attention.decode_fp8_tiles import LOG2E, NO_SCORE, attend_split
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.attention.split_kv import SplitKVSchedule
from blockyard.kernels.gpu_facts import runs_hopper_kernels
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.programmatic_launch import pdl_options

_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # its name since Triton 3.7
_WARPS = 4
_KEYS = 16  # of a warp at a time
_AHEAD = True  # the next keys and values are loaded before these are used, if registers hold both
_MOST_HEADS = 16  # of a K/V head; the tensor cores' instruction takes 8 at a time
_REGISTERS = 128  # of a thread, so that `paged_decode`'s number of programs fit
_SPLITS_AT_ONCE = 4  # that the last program loads
_DIMS = (64, 128)


@gluon.constexpr_function
def _key_words(dim: int, keys: int, warps: int) -> gl.DistributedLinearLayout:
    """How words of keys, [warps, keys, dim // 4], are loaded to be a left operand as they are.

    A thread has 16 adjacent numbers of a key.
    """
    own = [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    far = [[0, 8 << i, 0] for i in range((keys // 8).bit_length() - 1)]
    halves = [[0, 0, 16 << i] for i in range((dim // 64).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], *halves, *far],
        lane_bases=[[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=own, block_bases=[], shape=[warps, keys, dim // 4],
    )  # fmt: skip


@gluon.constexpr_function
def _value_words(dim: int, keys: int, warps: int) -> gl.DistributedLinearLayout:
    """The same of values, of which a thread has an eighth of the numbers."""
    own, width = [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)], dim // 32
    far = [[0, 8 << i, 0] for i in range((keys // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[*([0, 0, 1 << i] for i in range(width.bit_length() - 1)), [0, 1, 0], *far],
        lane_bases=[[0, 2, 0], [0, 4, 0], [0, 0, width], [0, 0, 2 * width], [0, 0, 4 * width]],
        warp_bases=own, block_bases=[], shape=[warps, keys, dim // 4],
    )  # fmt: skip


@gluon.jit
def _merge_warps(acc, l_i, m_i, HEADS: gl.constexpr, DIM: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr):
    """acc [HEADS, DIM], l_i and m_i [HEADS] of all warps' keys. PARTS: a layout where a thread has all warps' parts."""
    HEAD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, PARTS))
    # rows of acc are in the order of `attend_tile`
    acc = gl.permute(gl.reshape(acc, [WARPS, DIM // 8, 8, HEADS]), [0, 3, 2, 1])
    acc = gl.convert_layout(gl.reshape(acc, [WARPS, HEADS, DIM]), PARTS)
    l_i = gl.convert_layout(gl.sum(l_i, 1), gl.SliceLayout(2, PARTS))
    m_i = gl.convert_layout(m_i, gl.SliceLayout(2, PARTS))
    m_all = gl.max(m_i, 0)
    alpha = gl.exp2(m_i - m_all[None, :])
    l_all = gl.convert_layout(gl.sum(l_i * alpha, 0), HEAD)
    return gl.sum(acc * alpha[:, :, None], 0), l_all, gl.convert_layout(m_all, HEAD)


@gluon.jit
def _combine_if_last(
    row, head, num_splits, row_splits_ptr, semaphores_ptr, partial_out_ptr, lse_ptr, out_ptr, sinks_ptr, rows,
    GROUP: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, SPLITS: gl.constexpr,
    STORE: gl.constexpr,
):  # fmt: skip
    """As `combine.combine_if_last`: the last program of a row and K/V head combines its splits, SPLITS at a time."""
    semaphore = semaphores_ptr + head * rows + row
    _barrier()
    if gl.atomic_add(semaphore, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
        _barrier()
        first_split = gl.load(row_splits_ptr + row)
        group = gl.arange(0, HEADS, layout=gl.SliceLayout(1, STORE))
        dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, STORE))[None, :]
        heads, exists = head * GROUP + group, group < GROUP
        m_i = gl.full([HEADS], NO_SCORE, gl.float32, layout=gl.SliceLayout(1, STORE))
        l_i = gl.zeros([HEADS], gl.float32, layout=gl.SliceLayout(1, STORE))
        acc = gl.zeros([HEADS, DIM], gl.float32, layout=STORE)
        for start in range(0, num_splits, SPLITS):
            for s in gl.static_range(SPLITS):
                is_split = exists & (start + s < num_splits)
                place = (first_split + start + s).to(gl.int64) * (KV_HEADS * GROUP) + heads
                lse = gl.load(lse_ptr + place, mask=is_split, other=float("-inf"), cache_modifier=".cg")
                value = gl.load(
                    partial_out_ptr + place[:, None] * DIM + dims, mask=is_split[:, None], other=0.0,
                    cache_modifier=".cg",
                )  # fmt: skip
                m_new = gl.maximum(m_i, lse)
                alpha, p = gl.exp2(m_i - m_new), gl.exp2(lse - m_new)
                l_i = l_i * alpha + p
                acc = acc * alpha[:, None] + value * p[:, None]
                m_i = m_new
        l_i = _add_sinks(l_i, m_i, sinks_ptr, heads, exists, 1)
        acc = acc / gl.where(l_i > 0, l_i, 1.0)[:, None]
        places = out_ptr + (row * (KV_HEADS * GROUP) + heads)[:, None] * DIM + dims
        gl.store(places, acc.to(out_ptr.dtype.element_ty), mask=exists[:, None])
        gl.store(semaphore, 0)


@gluon.jit
def _add_sinks(l_i, m_i, sinks_ptr, heads, exists, num_splits):
    """As `attention_tiles.add_sinks`."""
    if sinks_ptr is not None:
        sink = gl.load(sinks_ptr + heads, mask=exists, other=float("-inf"))
        power = gl.minimum(sink * LOG2E - gl.where(m_i <= NO_SCORE, 0.0, m_i), 126.0)
        l_i += gl.where(num_splits == 1, gl.exp2(power), 0.0)
    return l_i


@gluon.jit(do_not_specialize=["max_splits", "rows"], do_not_specialize_on_alignment=["out_ptr"])
def _paged_decode_fp8_kernel(
    q_ptr, layer_ptr, tables_ptr, work_ptr, starts_ptr, partial_out_ptr, lse_ptr, row_splits_ptr, semaphores_ptr,
    out_ptr, scales_ptr, q_stride, table_stride, max_splits, rows, scale,
    KIND: gl.constexpr, CAP: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
    DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr,
    COMBINE_AT_ONCE: gl.constexpr, PDL: gl.constexpr, sinks_ptr=None,
):  # fmt: skip
    if PDL:
        gdc_wait()
    # layouts are made here, because Triton cannot record a launch that has them as arguments
    K_WORDS: gl.constexpr = _key_words(DIM, KEYS, WARPS)
    V_WORDS: gl.constexpr = _value_words(DIM, KEYS, WARPS)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    PARTS: gl.constexpr = gl.BlockedLayout([WARPS, 1, 4], [1, 128 // DIM, DIM // 4], [1, WARPS, 1], [2, 1, 0])
    STORE: gl.constexpr = gl.SliceLayout(0, PARTS)
    # program i: splits of program i // KV_HEADS of the schedule, for one K/V head
    head = gl.program_id(0) % KV_HEADS
    k_scale, v_scale = gl.load(scales_ptr), gl.load(scales_ptr + 1)
    starts_ptr += gl.program_id(0) // KV_HEADS
    for split in range(gl.load(starts_ptr), gl.load(starts_ptr + 1)):
        item_ptr = work_ptr + split
        row = gl.load(item_ptr).to(gl.int64)
        slot = gl.load(item_ptr + max_splits).to(gl.int64)
        begin = gl.load(item_ptr + 2 * max_splits)
        stop = gl.load(item_ptr + 3 * max_splits)
        num_splits = gl.load(item_ptr + 4 * max_splits)
        acc, l_i, m_i = attend_split(
            q_ptr + row * q_stride, begin, stop, tables_ptr + slot * table_stride, layer_ptr, head, scale * k_scale,
            KIND, CAP, GROUP, HEADS, KV_HEADS, DIM, BLOCK_SIZE, KEYS, WARPS, AHEAD, K_WORDS, V_WORDS, MMA,
        )  # fmt: skip
        acc, l_all, m_all = _merge_warps(acc, l_i, m_i, HEADS, DIM, WARPS, PARTS)
        group = gl.arange(0, HEADS, layout=gl.SliceLayout(1, STORE))
        heads, exists = head * GROUP + group, group < GROUP
        l_all = _add_sinks(l_all, m_all, sinks_ptr, heads, exists, num_splits)
        acc = acc * (v_scale / gl.where(l_all > 0, l_all, 1.0))[:, None]  # zeros in padding rows
        dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, STORE))[None, :]
        if num_splits == 1:
            places = out_ptr + (row * (KV_HEADS * GROUP) + heads)[:, None] * DIM + dims
            gl.store(places, acc.to(out_ptr.dtype.element_ty), mask=exists[:, None])
        else:
            split_heads = split * (KV_HEADS * GROUP) + heads
            partial_out = partial_out_ptr + split_heads[:, None].to(gl.int64) * DIM + dims
            gl.store(partial_out, acc, mask=exists[:, None])
            gl.store(lse_ptr + split_heads, m_all + gl.log2(l_all), mask=exists)
            if COMBINE_AT_ONCE > 0:
                _combine_if_last(
                    row, head, num_splits, row_splits_ptr, semaphores_ptr, partial_out_ptr, lse_ptr, out_ptr,
                    sinks_ptr, rows, GROUP, HEADS, KV_HEADS, DIM, COMBINE_AT_ONCE, STORE,
                )  # fmt: skip
    if PDL:  # not earlier: the next kernel's programs would take the place of programs of this one
        gdc_launch_dependents()


_KINDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def fits_decode_fp8(q: Tensor, layer: Tensor) -> bool:
    """Whether the kernel supports the arguments of `paged_decode`."""
    shapes = q.shape[2] in _DIMS and q.shape[1] // layer.shape[2] <= _MOST_HEADS
    return layer.dtype in _KINDS and q.dtype.itemsize == 2 and shapes and runs_hopper_kernels(q.device)


def launch_decode_fp8(
    q: Tensor, layer: Tensor, metadata: PagedKVMetadata, rules: ScoreRules, out: Tensor, schedule: SplitKVSchedule,
    in_kernel: bool, pdl: bool,
) -> None:  # fmt: skip
    """Launches the kernel for checked arguments of `paged_decode`. in_kernel: whether it combines splits."""
    dim, kv_heads = q.shape[2], layer.shape[2]
    group = q.shape[1] // kv_heads
    _paged_decode_fp8_kernel[(schedule.programs * kv_heads,)](
        q, layer, metadata.tables, schedule.work, schedule.starts, schedule.partial_out, schedule.lse,
        schedule.row_splits, schedule.semaphores, out, rules.kv_scales, q.stride(0), metadata.tables.stride(0),
        schedule.work.shape[1], len(q), rules.power_scale,
        KIND=_KINDS[layer.dtype], CAP=rules.soft_cap or 0.0, GROUP=group, HEADS=8 if group <= 8 else 16,
        KV_HEADS=kv_heads, DIM=dim, BLOCK_SIZE=layer.shape[3], KEYS=_KEYS, WARPS=_WARPS, AHEAD=_AHEAD and group <= 8,
        COMBINE_AT_ONCE=_SPLITS_AT_ONCE if in_kernel else 0, PDL=pdl,
        sinks_ptr=rules.sinks, num_warps=_WARPS, maxnreg=_REGISTERS, **pdl_options(pdl),
    )  # fmt: skip

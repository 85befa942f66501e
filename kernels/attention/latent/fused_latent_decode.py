"""Latent decode attention of few rows and short contexts in one kernel, from the query to each head's values; on a GPU.

A program has one head and a split of its keys. It moves the head's query into the latent by the matrix of K, attends to
its split and multiplies the result by the matrix of V, before splits are combined: a product is linear, and a head has
fewer values than the latent has numbers. So all programs of a head read both matrices, in place of the kernels
`write_latent`, `head_products` (twice), `latent_decode` and `combine`. The last program of a head to finish combines
its splits.

A lane is a warp. Of a tile of keys it has every LANES-th, and its own online softmax, as in `fused_decode_lanes`. Rows
of the cache are in parts that a warp loads at once, because otherwise two warps would share a row. With PDL (see
`programmatic_launch`) a program loads its first keys and the matrix of K before it waits for the kernel before it,
under the condition that `fused_decode` states.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.attention.attention_tiles import LOG2E
from blockyard.kernels.attention.fused_decode import SplitSemaphores
from blockyard.kernels.attention.fused_decode_lanes import (
    combine_head_if_last,
    norm_and_rotate,
    quantize,
    split_key_range,
)
from blockyard.kernels.attention.latent.head_products import head_products_reference
from blockyard.kernels.attention.latent.latent_decode import latent_decode_reference
from blockyard.kernels.attention.latent.write_latent import check_new_rows, write_latent_reference
from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.kv_cache.kv_types import FP8_MAX
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl

_COMBINED_ELEMENTS = 4096  # elements of splits that are combined at a time
_PART = 256  # numbers of a row that a warp loads at once, 16 bytes a thread: a row of a tile belongs to one warp


@dataclass(frozen=True, slots=True)
class FusedLatentConfig:
    """How a program divides its work. The defaults keep all of it in registers, with the sizes of DeepSeek's models."""

    min_keys: int = 64  # keys of a split, at least
    keys: int = 4  # of a lane at a time
    warps: int = 8
    up_rows: int = 128  # of the matrices of K and V at a time
    programs: int = 132  # at most, if keys are split


def fused_latent_decode_reference(
    query: Tensor,
    rows: Tensor,
    layer: Tensor,
    metadata: PagedKVMetadata,
    rotation: Tensor | None,
    weight: Tensor,
    eps: float,
    up: Tensor,
    scale: float,
    scales: Tensor | None = None,
) -> Tensor:
    """As `fused_latent_decode`. Writes to query and rows, too."""
    plain = query.shape[2] - (rows.shape[1] - weight.shape[0])
    write_latent_reference(query, rows, layer, metadata, rotation, weight, eps, scales)
    q_latent = head_products_reference(query[..., :plain], up[:, :plain])
    known = layer.to(query.dtype) * (1.0 if scales is None else scales[0].to(query.dtype))
    attended = latent_decode_reference(q_latent, query[..., plain:], known, metadata, scale)
    return head_products_reference(attended, up[:, plain:].mT).flatten(1)


@triton.jit
def _load_keys(
    start, stop, table_ptr, layer_ptr,
    ROW: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Rows of the cache from `start` on, below `stop`, as PARTS of [TILE, PART]."""
    keys = start + tl.arange(0, TILE)
    known = keys < stop
    blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
    places = layer_ptr + (blocks * BLOCK_SIZE + keys % BLOCK_SIZE)[:, None] * ROW
    parts = ()
    for part in tl.static_range(PARTS):
        dims = part * PART + tl.arange(0, PART)
        inside = known[:, None] & (dims < ROW)[None, :]
        parts += (tl.load(places + dims[None, :], mask=inside, other=0.0),)  # type: ignore[assignment]
    return parts


@triton.jit
def _load_up(up_ptr, start, end, LATENT: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, UP_ROWS: tl.constexpr):
    """Rows from `start` on, below `end`, of a head's matrices, as PARTS of [UP_ROWS, PART]."""
    rows = start + tl.arange(0, UP_ROWS)
    parts = ()
    for part in tl.static_range(PARTS):
        dims = part * PART + tl.arange(0, PART)
        inside = (rows < end)[:, None] & (dims < LATENT)[None, :]
        places = up_ptr + rows[:, None] * LATENT + dims[None, :]
        parts += (tl.load(places, mask=inside, other=0.0),)  # type: ignore[assignment]
    return parts


@triton.jit
def _absorb(
    x_ptr, up_ptr, up,
    PLAIN: tl.constexpr, LATENT: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, UP_ROWS: tl.constexpr,
):  # fmt: skip
    """A head's query [PLAIN] times its matrix of K, of which `up` are the first rows: PARTS of [PART]."""
    rows = tl.arange(0, UP_ROWS)
    x = tl.load(x_ptr + rows, mask=rows < PLAIN, other=0.0).to(tl.float32)[:, None]
    sums = ()
    for part in tl.static_range(PARTS):
        sums += (tl.sum(up[part].to(tl.float32) * x, 0),)  # type: ignore[assignment]
    for first in tl.static_range(UP_ROWS, PLAIN, UP_ROWS):
        more = _load_up(up_ptr, first, PLAIN, LATENT, PARTS, PART, UP_ROWS)
        x = tl.load(x_ptr + first + rows, mask=first + rows < PLAIN, other=0.0).to(tl.float32)[:, None]
        longer = ()
        for part in tl.static_range(PARTS):
            longer += (sums[part] + tl.sum(more[part].to(tl.float32) * x, 0),)  # type: ignore[assignment]
        sums = longer
    return sums


@triton.jit
def _load_part(ptr, dims, inside, LANES: tl.constexpr, PART: tl.constexpr):
    """Numbers `dims` of a vector in float32, [LANES, PART], the same in each lane: warps then exchange nothing."""
    places = tl.broadcast_to(ptr + dims[None, :], [LANES, PART])
    return tl.load(places, mask=tl.broadcast_to(inside[None, :], [LANES, PART]), other=0.0).to(tl.float32)


@triton.jit
def _rotate_part(
    x, angle_ptr, part: tl.constexpr,
    LATENT: tl.constexpr, ROTATED: tl.constexpr, ROTATE: tl.constexpr, LANES: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Rotates the numbers of a part [LANES, PART] of a row that are behind the latent."""
    if ROTATE and (part + 1) * PART > LATENT:
        dims = part * PART + tl.arange(0, PART)
        inside = (dims >= LATENT) & (dims < LATENT + ROTATED)
        angle = _load_part(angle_ptr - LATENT, dims, inside, LANES, PART)
        angle = tl.where(inside[None, :], angle, (1 - dims % 2).to(tl.float32)[None, :])  # others stay as they are
        cos, sin = tl.split(tl.reshape(angle, [LANES, PART // 2, 2]))
        x = norm_and_rotate(x, 1.0, cos, sin, 0.0, PART, True, False)
    return x


@triton.jit
def _rotated_query(
    ptr, angle_ptr, part: tl.constexpr,
    LATENT: tl.constexpr, ROTATED: tl.constexpr, ROTATE: tl.constexpr, LANES: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """What a part [LANES, PART] of a row has of the query's rotated numbers, which are behind the latent; else 0."""
    x = tl.zeros([LANES, PART], tl.float32)
    if (part + 1) * PART > LATENT:
        dims = part * PART + tl.arange(0, PART)
        x = _load_part(ptr, dims, (dims >= LATENT) & (dims < LATENT + ROTATED), LANES, PART)
        x = _rotate_part(x, angle_ptr, part, LATENT, ROTATED, ROTATE, LANES, PART)
    return x


@triton.jit
def _new_row(
    row_ptr, weight_ptr, angle_ptr, eps, row_scale,
    dtype: tl.constexpr, FP8_MAX: tl.constexpr, LATENT: tl.constexpr, ROTATED: tl.constexpr, ROTATE: tl.constexpr,
    LANES: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """A row of the cache as a step writes it, in the dtype of the cache: PARTS of [LANES, PART], alike in each lane."""
    squares = tl.zeros([LANES], tl.float32)
    raw = ()
    for part in tl.static_range(PARTS):
        dims = part * PART + tl.arange(0, PART)
        x = _load_part(row_ptr, dims, dims < LATENT + ROTATED, LANES, PART)
        squares += tl.sum(tl.where((dims < LATENT)[None, :], x * x, 0.0), 1)
        raw += (x,)  # type: ignore[assignment]
    factor = tl.rsqrt(squares / LATENT + eps)[:, None]
    parts = ()
    for part in tl.static_range(PARTS):
        dims = part * PART + tl.arange(0, PART)
        weight = _load_part(weight_ptr, dims, dims < LATENT, LANES, PART)
        x = tl.where((dims < LATENT)[None, :], raw[part] * factor * weight, raw[part])
        x = _rotate_part(x, angle_ptr, part, LATENT, ROTATED, ROTATE, LANES, PART)
        x = x.to(row_ptr.dtype.element_ty).to(tl.float32)  # as prefills read it that decompress this row
        parts += (quantize(x, row_scale, dtype, FP8_MAX),)  # type: ignore[assignment]
    return parts


@triton.jit
def _attend_tile(
    q, rows, start, stop, scale, acc, l_i, m_i,
    PARTS: tl.constexpr, LATENT_PARTS: tl.constexpr, KEYS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Adds a tile, whose keys from `start` on end at `stop`, to acc, l_i and m_i of each lane."""
    valid = tl.reshape(start + tl.arange(0, KEYS * LANES) < stop, [KEYS, LANES])
    scores = tl.zeros([KEYS, LANES], tl.float32)
    for part in tl.static_range(PARTS):
        x = tl.reshape(rows[part], [KEYS, LANES, rows[part].shape[1]]).to(tl.float32)
        scores += tl.sum(x * q[part][None, :, :], 2)
    scores = tl.where(valid, scores * scale, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(scores, 0))
    m_safe = tl.maximum(m_new, -3e38)  # while the lane has seen no key
    p = tl.exp2(scores - m_safe[None, :])
    alpha = tl.exp2(m_i - m_safe)
    sums = ()
    for part in tl.static_range(LATENT_PARTS):
        x = tl.reshape(rows[part], [KEYS, LANES, rows[part].shape[1]]).to(tl.float32)
        sums += (acc[part] * alpha[:, None] + tl.sum(p[:, :, None] * x, 0),)  # type: ignore[assignment]
    return sums, l_i * alpha + tl.sum(p, 0), m_new


@triton.jit
def _store_values(
    acc, l_i, m_i, factor, up_ptr, out_ptr, partial_out_ptr, lse_ptr, num_splits,
    PLAIN: tl.constexpr, VALUE: tl.constexpr, LATENT: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
    UP_ROWS: tl.constexpr,
):  # fmt: skip
    """Combines the lanes of a split and stores its product with the matrix of V, to `out_ptr` if there is one split."""
    up = _load_up(up_ptr, PLAIN, PLAIN + VALUE, LATENT, PARTS, PART, UP_ROWS)
    m_split = tl.max(m_i, 0)
    alpha = tl.exp2(m_i - m_split)
    l_split = tl.sum(l_i * alpha, 0)
    alpha *= factor / l_split
    attended = ()
    for part in tl.static_range(PARTS):
        attended += (tl.sum(acc[part] * alpha[:, None], 0)[None, :],)  # type: ignore[assignment]
    for first in tl.static_range(0, VALUE, UP_ROWS):
        if first > 0:
            up = _load_up(up_ptr, PLAIN + first, PLAIN + VALUE, LATENT, PARTS, PART, UP_ROWS)
        y, value = tl.zeros([UP_ROWS], tl.float32), first + tl.arange(0, UP_ROWS)
        for part in tl.static_range(PARTS):
            y += tl.sum(up[part].to(tl.float32) * attended[part], 1)
        if num_splits == 1:
            tl.store(out_ptr + value, y, mask=value < VALUE)
        else:
            tl.store(partial_out_ptr + value, y, mask=value < VALUE)
    if num_splits > 1:
        tl.store(lse_ptr, m_split + tl.log2(l_split))


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "out_ptr"])
def _fused_latent_decode_kernel(
    query_ptr, rows_ptr, layer_ptr, slots_ptr, positions_ptr, tables_ptr, rotation_ptr, weight_ptr, up_ptr, scales_ptr,
    partial_out_ptr, lse_ptr, semaphores_ptr, out_ptr, query_stride, row_stride, table_stride, scale, eps,
    FP8_MAX: tl.constexpr, HEADS: tl.constexpr, PLAIN: tl.constexpr, VALUE: tl.constexpr, VALUE_DIM: tl.constexpr,
    LATENT: tl.constexpr, ROTATED: tl.constexpr, PARTS: tl.constexpr, LATENT_PARTS: tl.constexpr, PART: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROTATE: tl.constexpr, MIN_KEYS: tl.constexpr, KEYS: tl.constexpr, LANES: tl.constexpr,
    UP_ROWS: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (j, s, i): split s of the keys of row i for head j
    if PDL:
        gdc_launch_dependents()
    head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    position = tl.where(slot >= 0, tl.load(positions_ptr + row), 0).to(tl.int32)
    begin, stop, num_splits = split_key_range(position, split, tl.num_programs(1), 0, False, MIN_KEYS)
    if split >= num_splits:  # without a wait: the first splits wait for the kernel before, so this kernel ends after it
        return
    table = tables_ptr + slot * table_stride
    keys = _load_keys(begin, stop, table, layer_ptr, LATENT + ROTATED, PARTS, PART, BLOCK_SIZE, KEYS * LANES)
    up_ptr += head.to(tl.int64) * (PLAIN + VALUE) * LATENT
    up = _load_up(up_ptr, 0, PLAIN, LATENT, LATENT_PARTS, PART, UP_ROWS)
    is_last = split == num_splits - 1
    writes = (slot >= 0) & (head == 0) & is_last
    new_block = tl.load(table + position // BLOCK_SIZE, mask=writes, other=0).to(tl.int64)
    if PDL:
        gdc_wait()
    row_scale = 1.0
    if FP8_MAX > 0:
        row_scale = tl.load(scales_ptr)
        scale *= row_scale
    angle_ptr = rotation_ptr + row * ROTATED
    new = _new_row(
        rows_ptr + row * row_stride, weight_ptr, angle_ptr, eps, row_scale, layer_ptr.dtype.element_ty, FP8_MAX, LATENT,
        ROTATED, ROTATE, LANES, PARTS, PART,
    )  # fmt: skip
    source = query_ptr + row * query_stride + head * (PLAIN + ROTATED)
    absorbed = _absorb(source, up_ptr, up, PLAIN, LATENT, LATENT_PARTS, PART, UP_ROWS)
    place = layer_ptr + (new_block * BLOCK_SIZE + position % BLOCK_SIZE) * (LATENT + ROTATED)
    # the new row belongs to the last split, to its first lane
    here = tl.where(is_last, tl.arange(0, LANES), 1) == 0
    new_score = tl.zeros([LANES], tl.float32)
    q, acc = (), ()
    for part in tl.static_range(PARTS):
        dims = part * PART + tl.arange(0, PART)
        x = _rotated_query(source + PLAIN - LATENT, angle_ptr, part, LATENT, ROTATED, ROTATE, LANES, PART)
        if part < LATENT_PARTS:
            x += absorbed[part][None, :]
        x = x.to(query_ptr.dtype.element_ty).to(tl.float32)  # as kernels of their own round it
        if writes:
            places = tl.broadcast_to(place + dims[None, :], [LANES, PART])
            tl.store(places, new[part], mask=here[:, None] & (dims < LATENT + ROTATED)[None, :])
        y = new[part].to(tl.float32)
        new_score += tl.sum(x * y, 1)
        q += (x,)  # type: ignore[assignment]
        if part < LATENT_PARTS:
            acc += (tl.where(here[:, None], y, 0.0),)  # type: ignore[assignment]
    m_i = tl.where(here, new_score * scale, float("-inf"))
    l_i = here.to(tl.float32)
    acc, l_i, m_i = _attend_tile(q, keys, begin, stop, scale, acc, l_i, m_i, PARTS, LATENT_PARTS, KEYS, LANES)
    for start in range(begin + KEYS * LANES, stop, KEYS * LANES):
        keys = _load_keys(start, stop, table, layer_ptr, LATENT + ROTATED, PARTS, PART, BLOCK_SIZE, KEYS * LANES)
        acc, l_i, m_i = _attend_tile(q, keys, start, stop, scale, acc, l_i, m_i, PARTS, LATENT_PARTS, KEYS, LANES)
    out_head = row * HEADS + head
    first_split = out_head * tl.num_programs(1)
    _store_values(
        acc, l_i, m_i, tl.where(slot >= 0, row_scale, 0.0), up_ptr, out_ptr + out_head * VALUE,
        partial_out_ptr + (first_split + split) * VALUE, lse_ptr + first_split + split, num_splits, PLAIN, VALUE,
        LATENT, LATENT_PARTS, PART, UP_ROWS,
    )  # fmt: skip
    if num_splits > 1:
        combine_head_if_last(
            out_head, num_splits, out_ptr, partial_out_ptr, lse_ptr, semaphores_ptr, None, HEADS, VALUE, VALUE_DIM,
            SPLITS_AT_ONCE,
        )  # fmt: skip


def fused_latent_decode(
    query: Tensor,
    rows: Tensor,
    layer: Tensor,
    metadata: PagedKVMetadata,
    rotation: Tensor | None,
    weight: Tensor,
    eps: float,
    up: Tensor,
    scale: float,
    max_seq_len: int,
    semaphores: SplitSemaphores,
    scales: Tensor | None = None,
    config: FusedLatentConfig | None = None,
) -> Tensor:
    """As `write_latent`, absorption and `latent_decode`, one row a sequence -> [rows, heads * value].

    query [rows, heads, plain + rotated] and rows [rows, latent + rotated], before norm and rotation; they are not
    changed, and rows of both may be strided. layer [num_blocks, 1, 1, block_size, latent + rotated]; rotation [rows, 1,
    rotated / 2] complex64, None: nothing is rotated; weight [latent] of the latent's RMSNorm; up [heads, plain + value,
    latent], contiguous. Positions are at most `max_seq_len`, which only sizes buffers. semaphores has a counter for
    each head of each row. scales: of an 8-bit cache, the first for the whole row. Blocks and positions are not checked
    on device. Raises ValueError for other shapes and dtypes.
    """
    count, heads, query_dim = query.shape
    latent, row_dim = weight.shape[0], rows.shape[1]
    rotated = row_dim - latent
    plain = query_dim - rotated
    value = up.shape[1] - plain
    check_new_rows(query, rows, layer, metadata, rotation, weight, scales)
    if latent % 2:
        raise ValueError(f"rows {list(rows.shape)} have a latent of {latent}, which is odd")
    if value < 1 or up.shape != (heads, plain + value, latent) or up.dtype != query.dtype or not up.is_contiguous():
        raise ValueError(f"up {list(up.shape)} {up.dtype} does not fit query {list(query.shape)} {query.dtype}")
    if len(semaphores.counts) < count * heads:
        raise ValueError(f"{len(semaphores.counts)} counts for {count} rows of {heads} heads")
    out = query.new_empty((count, heads * value))
    if not count:
        return out
    config = config or FusedLatentConfig()
    max_splits = max(min(config.programs // (count * heads), ceil_div(max_seq_len, config.min_keys)), 1)
    partials = count * heads * max_splits
    partial_out = torch.empty((partials, value), dtype=torch.float32, device=query.device)
    lse = torch.empty(partials, dtype=torch.float32, device=query.device)
    pdl, value_dim, part = supports_pdl(query.device), next_power_of_2(value), min(_PART, next_power_of_2(row_dim))
    angles = query if rotation is None else torch.view_as_real(rotation.contiguous())
    _fused_latent_decode_kernel[(heads, max_splits, count)](
        query, rows, layer, metadata.slots, metadata.positions, metadata.tables, angles, weight, up,
        query if scales is None else scales, partial_out, lse, semaphores.counts, out, query.stride(0), rows.stride(0),
        metadata.tables.stride(0), scale * LOG2E, eps,
        FP8_MAX=FP8_MAX.get(layer.dtype, 0.0), HEADS=heads, PLAIN=plain, VALUE=value, VALUE_DIM=value_dim,
        LATENT=latent, ROTATED=rotated, PARTS=ceil_div(row_dim, part), LATENT_PARTS=ceil_div(latent, part), PART=part,
        BLOCK_SIZE=layer.shape[3], ROTATE=rotation is not None, MIN_KEYS=config.min_keys, KEYS=config.keys,
        LANES=config.warps, UP_ROWS=min(config.up_rows, next_power_of_2(max(plain, value))),
        SPLITS_AT_ONCE=min(max(_COMBINED_ELEMENTS // value_dim, 1), next_power_of_2(max_splits)), PDL=pdl,
        num_warps=config.warps, num_stages=2, **pdl_options(pdl),
    )  # fmt: skip
    return out

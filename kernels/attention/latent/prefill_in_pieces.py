"""The attention of prefills over latent rows: decompresses cached rows piece by piece, then the new ones; on a GPU.

The number of pieces follows from a bound of the lengths that the host knows, so nothing waits for the device.
"""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.attention.latent.latent_prefill import KeyPiece, PrefillState, latent_prefill
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata

_PIECE_BYTES = 128 << 20  # of decompressed K and V
_MULTIPLE = 64  # tokens; lengths of pieces are multiples
_ROWS = 16  # of a program that gathers

# adds to K and V [n, heads * (plain + value)], in place, what else their latents [n, latent] make; the third argument
# says how many successive latents each sequence has; None: they are those of the new rows
AddToKeysValues = Callable[[Tensor, Tensor, int | None], None]


def prefill_in_pieces_reference(
    query: Tensor,
    rows: Tensor,
    layer: Tensor,
    metadata: PagedKVMetadata,
    query_start_loc: Tensor,
    rules: ScoreRules,
    up: Tensor,
) -> Tensor:
    """In one piece, in the dtype of its inputs; cached tokens are read from the cache, new ones from `rows`."""
    heads, latent = up.shape[0], up.shape[2]
    plain = query.shape[2] - (rows.shape[1] - latent)
    bounds = query_start_loc.tolist()
    out = query.new_zeros((len(query), heads, up.shape[1] - plain))
    for start, end in itertools.pairwise(bounds):
        slot = int(metadata.slots[start]) if start < end else -1
        if slot < 0:
            continue
        cached = torch.arange(int(metadata.positions[start]), device=query.device)
        blocks = metadata.tables[slot, cached // layer.shape[3]].long()
        before = layer[blocks, 0, 0, cached % layer.shape[3]].to(rows.dtype)
        known = torch.cat((before, rows[start - bounds[0] : end - bounds[0]]))
        both = torch.einsum("kl,hnl->hkn", known[:, :latent], up)
        keys = torch.cat((both[..., :plain], known[:, latent:].expand(heads, -1, -1)), 2)
        scores = query[start:end].transpose(0, 1) @ keys.mT * rules.scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=query.device).triu_(len(cached) + 1)
        p = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[start:end] = (p @ both[..., plain:]).transpose(0, 1)
    return out[bounds[0] :].flatten(1)


def gather_rows_reference(
    layer: Tensor, metadata: PagedKVMetadata, query_start_loc: Tensor, piece: KeyPiece, dtype: torch.dtype
) -> Tensor:
    size, out = layer.shape[3], []
    for start in query_start_loc.tolist()[:-1]:
        slot = int(metadata.slots[start])
        known = max(min(int(metadata.positions[start]) - piece.first, piece.tokens), 0) if slot >= 0 else 0
        tokens = torch.arange(piece.first, piece.first + known, device=layer.device)
        part = torch.zeros((piece.tokens, layer.shape[4]), dtype=dtype, device=layer.device)
        part[:known] = layer[metadata.tables[slot, tokens // size].long(), 0, 0, tokens % size].to(dtype)
        out.append(part)
    return torch.cat(out)


@triton.jit(
    do_not_specialize=["num_tokens", "first", "piece_tokens"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "query_start_ptr"],
)
def _gather_rows_kernel(
    layer_ptr, slots_ptr, positions_ptr, tables_ptr, query_start_ptr, out_ptr, scales_ptr, table_stride, num_rows,
    num_tokens, first, piece_tokens,
    SCALED: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROW_DIM: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # program i: ROWS rows of the output, which may belong to two sequences
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    start = tl.load(query_start_ptr + row // piece_tokens, mask=exists, other=0)
    position = first + row % piece_tokens
    exists_in_step = exists & (start < num_tokens)  # not so for a last sequence without tokens
    slot = tl.load(slots_ptr + start, mask=exists_in_step, other=-1)
    context_len = tl.load(positions_ptr + start, mask=exists_in_step, other=0)
    known = exists & (slot >= 0) & (position < context_len)
    block = tl.load(tables_ptr + slot * table_stride + position // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
    dims = tl.arange(0, DIM)
    places = layer_ptr + (block * BLOCK_SIZE + position % BLOCK_SIZE)[:, None] * ROW_DIM + dims[None, :]
    x = tl.load(places, mask=known[:, None] & (dims < ROW_DIM)[None, :], other=0.0)
    if SCALED:
        x = x.to(tl.float32) * tl.load(scales_ptr)
    out_places = out_ptr + row.to(tl.int64)[:, None] * ROW_DIM + dims[None, :]
    tl.store(out_places, x.to(out_ptr.dtype.element_ty), mask=exists[:, None] & (dims < ROW_DIM)[None, :])


def gather_rows(
    layer: Tensor,
    metadata: PagedKVMetadata,
    query_start_loc: Tensor,
    piece: KeyPiece,
    dtype: torch.dtype,
    scales: Tensor | None = None,
) -> Tensor:
    """Copies a piece of each sequence's cached rows: -> [num_seqs * piece.tokens, row_dim] in `dtype`.

    layer [num_blocks, 1, 1, block_size, row_dim], contiguous. Rows that are not cached yet are zeros. scales: of an
    8-bit cache, the first for the whole row. Blocks and positions are not checked on device.
    """
    num_rows, row_dim = (len(query_start_loc) - 1) * piece.tokens, layer.shape[4]
    out = torch.empty((num_rows, row_dim), dtype=dtype, device=layer.device)
    if num_rows:
        _gather_rows_kernel[(ceil_div(num_rows, _ROWS),)](
            layer, metadata.slots, metadata.positions, metadata.tables, query_start_loc, out,
            layer if scales is None else scales, metadata.tables.stride(0), num_rows, len(metadata.slots), piece.first,
            piece.tokens,
            SCALED=scales is not None, BLOCK_SIZE=layer.shape[3], ROW_DIM=row_dim, DIM=next_power_of_2(row_dim),
            ROWS=_ROWS, num_warps=8,
        )  # fmt: skip
    return out


def prefill_in_pieces(
    query: Tensor,
    rows: Tensor,
    layer: Tensor,
    metadata: PagedKVMetadata,
    query_start_loc: Tensor,
    rules: ScoreRules,
    up: Tensor,
    max_context_len: int,
    out: Tensor,
    add: AddToKeysValues | None = None,
) -> None:
    """Causal attention of the rows from query_start_loc[0] on, whose latent rows are `rows`, before 8-bit rounding.

    query [tokens, heads, plain + rotated] and rows [tokens - query_start_loc[0], latent + rotated], of which the tokens
    may be strided, as `write_latent` leaves them; layer [num_blocks, 1, 1, block_size, latent + rotated]; up [heads,
    plain + value, latent], contiguous; query_start_loc: see `paged_prefill`. max_context_len: a bound of the tokens
    before each sequence's first row; each piece of them is decompressed, used or not. out [rows, heads * value],
    contiguous, is written whole, with zeros for padding sequences. add: None: `up` alone makes K and V. Raises
    ValueError for other shapes and dtypes.
    """
    heads, width, latent = up.shape
    rotated, num_seqs = rows.shape[1] - latent, len(query_start_loc) - 1
    if not up.is_contiguous() or not 0 < rotated < query.shape[2] or width <= query.shape[2] - rotated:
        raise ValueError(f"up {list(up.shape)} does not fit query {list(query.shape)} and rows {list(rows.shape)}")
    if num_seqs < 1 or not len(out):
        return
    matrix, state = up.view(heads * width, latent), None
    if max_context_len > 0:
        tokens = piece_tokens(num_seqs, heads * width * query.element_size(), max_context_len)
        state = PrefillState.make(len(out), heads, width + rotated - query.shape[2], query.device)
        for first in range(0, max_context_len, tokens):
            piece = KeyPiece(first, tokens)
            known = gather_rows(layer, metadata, query_start_loc, piece, query.dtype, rules.kv_scales)
            kv = _expand(known[:, :latent], matrix, add, tokens).view(-1, heads, width)
            latent_prefill(
                query, kv, known[:, latent:], metadata, query_start_loc, rules, out, piece, state, resume=first > 0
            )
    kv = _expand(rows[:, :latent], matrix, add, None).view(-1, heads, width)
    resume = state is not None
    latent_prefill(query, kv, rows[:, latent:], metadata, query_start_loc, rules, out, None, state, resume)


def _expand(latents: Tensor, matrix: Tensor, add: AddToKeysValues | None, tokens: int | None) -> Tensor:
    both = F.linear(latents, matrix)
    if add is not None:
        add(both, latents, tokens)
    return both


def piece_tokens(num_seqs: int, token_bytes: int, max_context_len: int) -> int:
    """Tokens of a piece of each sequence, so that K and V of all take `_PIECE_BYTES` at most, if those are enough."""
    fitting = _PIECE_BYTES // (num_seqs * token_bytes) // _MULTIPLE * _MULTIPLE
    return max(min(fitting, ceil_div(max_context_len, _MULTIPLE) * _MULTIPLE), _MULTIPLE)

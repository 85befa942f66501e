"""Draws a token a row without sorting, in three kernels of fixed grids: for CUDA graphs.

Every limit (min-p, top-k, top-p) keeps the tokens from some logit upwards. The first kernel reads all logits once and
leaves the largest of each span of tokens and its mass; rows without limits get their noise there. The second, a
program a row, sees from the spans which few can hold a token that is kept, gathers these tokens, finds the exact
threshold among them by bisection and draws. Rows with too many tokens to keep for that are left to the third.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.draw_narrow import draw_narrow
from blockyard.kernels.draw_wide import LOWEST, best_noisy, least_kept, settle

_SPAN = 128  # tokens
_SPANS = 32  # a tile of the first kernel
_TILE = 2048  # tokens that get noise at once
_CHUNK = 16  # spans that are gathered at once
_MOST_SPANS = 512  # that are gathered
_CANDIDATES = 1024
_PROGRAMS = 64 * 132  # of the first kernel, at most
_WIDE_PROGRAMS = 8 * 132  # of the third
_WARPS = (8, 8, 8)  # of the three kernels
_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # low bits of a key that are always the same


@dataclass(frozen=True, slots=True)
class DrawParams:
    """How slots are sampled, on the device; all contiguous, [num_slots] but for `key`."""

    temperature: Tensor  # float32; below 1e-5: greedy
    top_k: Tensor  # int32, from 1; the vocabulary's size is all
    top_p: Tensor  # float32, 1 is all
    min_p: Tensor  # float32, 0 is all
    key: Tensor  # [2, num_slots] int32 or int64, the two words of the request's seed
    choice: Tensor  # int32

    def check(self) -> None:
        """Raises ValueError."""
        num = self.temperature.shape[0]
        for name, dtype in (("temperature", torch.float32), ("top_p", torch.float32), ("min_p", torch.float32)):
            _check_one(name, getattr(self, name), (num,), (dtype,))
        _check_one("top_k", self.top_k, (num,), (torch.int32,))
        _check_one("choice", self.choice, (num,), (torch.int32,))
        _check_one("key", self.key, (2, num), (torch.int32, torch.int64))


@triton.jit
def _settings(row, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab):
    """slot, is greedy, 1 / temperature, top-k, top-p, min-p, has to be seen in spans."""
    slot = tl.load(slots_ptr + row)
    real = slot >= 0
    temperature = tl.load(temperature_ptr + slot, mask=real, other=0.0)
    top_k = tl.load(top_k_ptr + slot, mask=real, other=1)
    top_p = tl.load(top_p_ptr + slot, mask=real, other=1.0)
    min_p = tl.load(min_p_ptr + slot, mask=real, other=0.0)
    greedy = temperature < 1e-5
    in_spans = greedy | (top_k < vocab) | (top_p < 1.0) | (min_p > 0.0)
    return slot, greedy, 1.0 / tl.where(greedy, 1.0, temperature), top_k, top_p, min_p, in_spans


@triton.jit
def _noise_key(row, slot, index_ptr, key_ptr, choice_ptr, num_slots):
    index = tl.load(index_ptr + row).to(tl.uint32)
    choice = tl.load(choice_ptr + slot).to(tl.uint32)
    key0 = tl.load(key_ptr + slot).to(tl.uint32)
    return index, choice, key0, tl.load(key_ptr + num_slots + slot).to(tl.uint32)


@triton.jit
def _scan_kernel(
    logits_ptr,
    slots_ptr,
    index_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    key_ptr,
    choice_ptr,
    span_top_ptr,
    span_mass_ptr,
    best_ptr,
    token_ptr,
    stride,
    vocab,
    num_slots,
    num_spans,
    tiles,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,
    TILE: tl.constexpr,
    FAST: tl.constexpr,
):
    # program (i, j) has `tiles` tiles of row i, from tile j * tiles on
    row = tl.program_id(0).to(tl.int64)
    slot, _greedy, scale, _top_k, _top_p, _min_p, in_spans = _settings(
        row, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab
    )
    if slot < 0:
        return
    logits_ptr += row * stride
    first = tl.program_id(1) * tiles
    if in_spans:
        for tile in range(first, tl.minimum(first + tiles, tl.cdiv(num_spans, SPANS))):
            spans = tile * SPANS + tl.arange(0, SPANS)
            cols = spans[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
            x = tl.load(logits_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)
            top = tl.max(x, 1)
            # the bound keeps a span of nothing but -inf from becoming NaN; NaN and +inf do become NaN
            mass = tl.sum(tl.exp((x - tl.maximum(top, -3e38)[:, None]) * scale), 1)
            tl.store(span_top_ptr + row * num_spans + spans, top, mask=spans < num_spans)
            tl.store(span_mass_ptr + row * num_spans + spans, mass, mask=spans < num_spans)
    else:
        index, choice, key0, key1 = _noise_key(row, slot, index_ptr, key_ptr, choice_ptr, num_slots)
        each: tl.constexpr = SPANS * SPAN // TILE
        end = tl.minimum((first + tiles) * each, tl.cdiv(vocab, TILE))
        best, token = best_noisy(
            logits_ptr, vocab, first * each, end, scale, LOWEST, float("-inf"), 0.0, index, choice, key0, key1,
            0, TILE, FAST,
        )  # fmt: skip
        place = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(best_ptr + place, best)
        tl.store(token_ptr + place, token)


@triton.jit
def _choose_kernel(
    logits_ptr,
    slots_ptr,
    index_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    key_ptr,
    choice_ptr,
    span_top_ptr,
    span_mass_ptr,
    best_ptr,
    token_ptr,
    spans_ptr,
    values_ptr,
    ids_ptr,
    arrived_ptr,
    tokens_ptr,
    out_ptr,
    stride,
    vocab,
    num_slots,
    num_spans,
    programs,
    SHIFT: tl.constexpr,
    SPAN: tl.constexpr,
    ALL_SPANS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST_SPANS: tl.constexpr,
    MOST: tl.constexpr,
    FAST: tl.constexpr,
):
    # program i has row i
    row = tl.program_id(0).to(tl.int64)
    slot, greedy, scale, top_k, top_p, min_p, in_spans = _settings(
        row, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab
    )
    logits_ptr += row * stride
    best = tl.full([], 0.0, tl.float32)
    token = tl.full([], 0, tl.int32)
    if slot >= 0:
        if in_spans:
            spans = tl.arange(0, ALL_SPANS)
            real = spans < num_spans
            tops = tl.load(span_top_ptr + row * num_spans + spans, mask=real, other=float("-inf"))
            mass = tl.load(span_mass_ptr + row * num_spans + spans, mask=real, other=0.0)
            top = tl.max(tops, 0)
            broken = tl.max(tl.where(mass < float("inf"), 0, 1), 0) > 0
            if broken | (top == float("-inf")):
                best = tl.where(broken, float("nan"), float("-inf"))
            elif greedy:
                span = tl.min(tl.where(tops == top, spans, ALL_SPANS), 0)
                cols = span * SPAN + tl.arange(0, SPAN)
                x = tl.load(logits_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)
                token = tl.min(tl.where(x == top, cols, 0x7FFFFFFF), 0)
                best = top
            else:
                index, choice, key0, key1 = _noise_key(row, slot, index_ptr, key_ptr, choice_ptr, num_slots)
                least = least_kept(top, scale, min_p)
                masses = mass * tl.exp((tops - top) * scale)
                best, token, wide = draw_narrow(
                    logits_ptr, vocab, scale, top_k, top_p, min_p, least, spans, real, tops, top, masses,
                    index, choice, key0, key1, spans_ptr + row * MOST_SPANS, values_ptr + row * MOST,
                    ids_ptr + row * MOST, SHIFT, SPAN, CHUNK, MOST_SPANS, MOST, FAST,
                )  # fmt: skip
                token = tl.where(wide, -1, token)  # left to the third kernel, which needs the largest logit
                best = tl.where(wide, top, best)
        else:
            best, token = _best_part(best_ptr, token_ptr, row, programs, PROGRAMS)
    tl.store(arrived_ptr + row, 0)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(out_ptr + row, best)


@triton.jit
def _wide_kernel(
    logits_ptr,
    slots_ptr,
    index_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    key_ptr,
    choice_ptr,
    best_ptr,
    token_ptr,
    arrived_ptr,
    tokens_ptr,
    out_ptr,
    stride,
    vocab,
    num_slots,
    tiles,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FAST: tl.constexpr,
):
    # program (i, j) has `tiles` tiles of row i, from tile j * tiles on; the last of a row to arrive puts it together
    row = tl.program_id(0).to(tl.int64)
    if tl.load(tokens_ptr + row) >= 0:
        return
    slot, _greedy, scale, top_k, top_p, min_p, _in_spans = _settings(
        row, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab
    )
    index, choice, key0, key1 = _noise_key(row, slot, index_ptr, key_ptr, choice_ptr, num_slots)
    top = tl.load(out_ptr + row)
    least = least_kept(top, scale, min_p)
    logits_ptr += row * stride
    first, programs = tl.program_id(1) * tiles, tl.num_programs(1)
    end = tl.minimum(first + tiles, tl.cdiv(vocab, TILE))
    best, token = best_noisy(
        logits_ptr, vocab, first, end, scale, LOWEST, least, top, index, choice, key0, key1, SHIFT, TILE, FAST
    )
    tl.store(best_ptr + row * programs + tl.program_id(1), best)
    tl.store(token_ptr + row * programs + tl.program_id(1), token)
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + row, 1) < programs - 1:
        return
    best, token = _best_part(best_ptr, token_ptr, row, programs, PROGRAMS)
    best, token = settle(
        best, token, logits_ptr, vocab, scale, top_k, top_p, least, top, index, choice, key0, key1, SHIFT, TILE, FAST
    )
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(out_ptr + row, best)


@triton.jit
def _best_part(best_ptr, token_ptr, row, programs, PROGRAMS: tl.constexpr):
    """Of what the programs of a row found: NaN if one is, else the largest and the lowest token that has it."""
    places = tl.arange(0, PROGRAMS)
    inside = places < programs
    values = tl.load(best_ptr + row * programs + places, mask=inside, other=float("-inf"))
    ids = tl.load(token_ptr + row * programs + places, mask=inside, other=0x7FFFFFFF)
    best = tl.max(values, 0)
    token = tl.min(tl.where(values == best, ids, 0x7FFFFFFF), 0)
    token = tl.where(best > float("-inf"), token, 0)
    broken = tl.max(tl.where(values < float("inf"), 0, 1), 0) > 0
    return tl.where(broken, float("nan"), best), tl.where(broken, 0, token)


def draw_tokens(logits: Tensor, slots: Tensor, index: Tensor, params: DrawParams, tokens: Tensor, best: Tensor) -> None:
    """logits [rows, vocab] bfloat16, float16 or float32, rows may be strided; slots [rows] int64, below 0: a row that
    pads; index [rows] int64, of the new token in its sequence, the noise's counter.

    Writes tokens [rows] int64 and best [rows] float32: what won with its noise, in no fixed scale (the logit itself
    where a slot is greedy). `best` is -inf where no token is allowed and NaN where a logit is NaN or +inf; the token
    is 0 then. Rows that pad get token 0 and best 0. Among equal values the lowest token wins; tokens as likely as the
    last one that top-k or top-p keeps are kept. No host sync, grids that follow from the shapes alone: for CUDA
    graphs. Slots must lie below num_slots: not checked on device. Raises ValueError for other shapes and dtypes.
    """
    rows, vocab = logits.shape
    _check_inputs(logits, slots, index, tokens, best)
    params.check()
    if rows == 0:
        return
    device, num_slots = logits.device, params.temperature.shape[0]
    num_spans = triton.cdiv(vocab, _SPAN)
    tiles, programs = _split(triton.cdiv(num_spans, _SPANS), _PROGRAMS // rows)
    wide_tiles, wide_programs = _split(triton.cdiv(vocab, _TILE), _WIDE_PROGRAMS // rows)
    most = max(programs, wide_programs)
    span_top, span_mass = torch.empty((2, rows, num_spans), dtype=torch.float32, device=device)
    part_best = torch.empty((rows, most), dtype=torch.float32, device=device)
    part_token = torch.empty((rows, most), dtype=torch.int32, device=device)
    spans = torch.empty((rows, _MOST_SPANS), dtype=torch.int32, device=device)
    ids = torch.empty((rows, _CANDIDATES), dtype=torch.int32, device=device)
    values = torch.empty((rows, _CANDIDATES), dtype=torch.float32, device=device)
    arrived = torch.empty(rows, dtype=torch.int32, device=device)
    settings = (params.temperature, params.top_k, params.top_p, params.min_p, params.key, params.choice)
    inputs, parts, sizes = (
        (logits, slots, index, *settings),
        (part_best, part_token),
        (logits.stride(0), vocab, num_slots),
    )
    ways = {"FAST": logits.is_cuda, "TILE": _TILE}
    _scan_kernel[(rows, programs)](
        *inputs,
        span_top,
        span_mass,
        *parts,
        *sizes,
        num_spans,
        tiles,
        SPAN=_SPAN,
        SPANS=_SPANS,
        num_warps=_WARPS[0],
        **ways,
    )
    _choose_kernel[(rows,)](
        *inputs,
        span_top,
        span_mass,
        *parts,
        spans,
        values,
        ids,
        arrived,
        tokens,
        best,
        *sizes,
        num_spans,
        programs,
        SHIFT=_SHIFT[logits.dtype],
        SPAN=_SPAN,
        ALL_SPANS=triton.next_power_of_2(num_spans),
        PROGRAMS=triton.next_power_of_2(programs),
        CHUNK=_CHUNK,
        MOST_SPANS=_MOST_SPANS,
        MOST=_CANDIDATES,
        FAST=logits.is_cuda,
        num_warps=_WARPS[1],
    )
    _wide_kernel[(rows, wide_programs)](
        *inputs,
        *parts,
        arrived,
        tokens,
        best,
        *sizes,
        wide_tiles,
        SHIFT=_SHIFT[logits.dtype],
        PROGRAMS=triton.next_power_of_2(wide_programs),
        num_warps=_WARPS[2],
        **ways,
    )


def _split(tiles: int, programs: int) -> tuple[int, int]:
    """How many tiles a program of a row has, and the number of programs, `programs` at most."""
    each = triton.cdiv(tiles, max(1, min(tiles, programs)))
    return each, triton.cdiv(tiles, each)


def _check_inputs(logits: Tensor, slots: Tensor, index: Tensor, tokens: Tensor, best: Tensor) -> None:
    rows = logits.shape[0]
    if logits.dtype not in _SHIFT or logits.stride(1) != 1 or logits.shape[1] == 0:
        raise ValueError(f"expected rows of float logits, got {logits.dtype}, {logits.shape}, {logits.stride()}")
    for name, one in (("slots", slots), ("index", index), ("tokens", tokens)):
        _check_one(name, one, (rows,), (torch.int64,))
    _check_one("best", best, (rows,), (torch.float32,))


def _check_one(name: str, one: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if one.shape != shape or one.dtype not in dtypes or not one.is_contiguous():
        raise ValueError(f"{name}: expected contiguous {list(shape)} of {dtypes}, got {list(one.shape)} of {one.dtype}")

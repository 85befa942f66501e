"""Draws a token a row without sorting, in three kernels of fixed grids: for CUDA graphs.

Every limit (min-p, top-k, top-p) keeps the tokens from some logit upwards. The first kernel reads all logits once and
leaves the largest of each span of tokens and its mass; rows without limits get their noise there. The second, a
program a row, sees from the spans which few can hold a token that is kept, gathers these tokens, finds the exact
threshold among them by bisection and draws. Rows with too many tokens to keep for that are left to the third.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from blockyard.kernels.draw_stages import choose_kernel, scan_kernel, wide_kernel

_SPAN = 128  # tokens
_SPANS = 16  # a tile of the first kernel
_TILE = 1024  # tokens that get noise at once
_CHUNK = 16  # spans that are gathered at once
_MOST_SPANS = 512  # that are gathered
_CANDIDATES = 1024
_PROGRAMS = 8 * 132  # of the first kernel, at most
_WIDE_PROGRAMS = 8 * 132  # of the third
_WEIGHED = 4096  # tokens that are weighed at once
_WARPS = (4, 4, 8)  # of the three kernels
_STAGES = (3, 2)  # loads under way, first and third kernel
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


@dataclass(frozen=True, slots=True)
class Adjusted:
    """Logits that count in place of the raw ones, of the slots that have such a row."""

    row: Tensor  # [num_slots] int32; below 0: none
    logits: Tensor  # [adjusted rows, vocab] float32, rows may be strided


def draw_tokens(
    logits: Tensor,
    slots: Tensor,
    index: Tensor,
    params: DrawParams,
    tokens: Tensor,
    best: Tensor,
    adjusted: Adjusted | None = None,
) -> None:
    """logits [rows, vocab] bfloat16, float16 or float32, rows may be strided; slots [rows] int64, below 0: a row that
    pads; index [rows] int64, of the new token in its sequence, the noise's counter; adjusted: see `penalize_logits`.

    Writes tokens [rows] int64 and best [rows] float32: what won with its noise, in no fixed scale (the logit itself
    where a slot is greedy). `best` is -inf where no token is allowed and NaN where a logit is NaN or +inf; the token
    is 0 then. Rows that pad get token 0 and best 0. Among equal values the lowest token wins; tokens as likely as the
    last one that top-k or top-p keeps are kept. No host sync, grids that follow from the shapes alone: for CUDA
    graphs. Slots must lie below num_slots: not checked on device. Raises ValueError for other shapes and dtypes.
    """
    rows, vocab = logits.shape
    _check_inputs(logits, slots, index, tokens, best)
    params.check()
    if adjusted is not None:
        _check_adjusted(adjusted, params.temperature.shape[0], vocab)
    if rows == 0:
        return
    num_spans = triton.cdiv(vocab, _SPAN)
    tiles, programs = _split(triton.cdiv(num_spans, _SPANS), _PROGRAMS // rows)
    wide_tiles, wide_programs = _split(triton.cdiv(vocab, _TILE), _WIDE_PROGRAMS // rows)
    f32, i32, device = torch.float32, torch.int32, logits.device
    most = max(programs, wide_programs)
    parts = (
        torch.empty((rows, most), dtype=f32, device=device),
        torch.empty((rows, most), dtype=i32, device=device),
    )
    top, mass = torch.empty((2, rows, num_spans), dtype=f32, device=device)
    lists = (
        torch.empty((rows, _MOST_SPANS), dtype=i32, device=device),
        torch.empty((rows, _CANDIDATES), dtype=f32, device=device),
        torch.empty((rows, _CANDIDATES), dtype=i32, device=device),
    )
    arrived, whole = torch.empty(rows, dtype=i32, device=device), torch.empty(rows, dtype=f32, device=device)
    settings = (params.temperature, params.top_k, params.top_p, params.min_p, params.key, params.choice)
    other = (slots, logits, 0) if adjusted is None else (adjusted.row, adjusted.logits, adjusted.logits.stride(0))
    shared, sizes = (logits, (slots, index), settings, other), (logits.stride(0), vocab, params.temperature.shape[0])
    out, shift, ways = (tokens, best), _SHIFT[logits.dtype], {"OTHER": adjusted is not None, "FAST": logits.is_cuda}
    scan_kernel[(rows, programs)](
        *shared, (top, mass), parts, *sizes, num_spans, tiles, SPAN=_SPAN, SPANS=_SPANS, TILE=_TILE, STAGES=_STAGES[0],
        num_warps=_WARPS[0],
        **ways,
    )  # fmt: skip
    choose_kernel[(rows,)](
        *shared, (top, mass), parts, lists, out, arrived, whole, *sizes, num_spans, programs, SHIFT=shift, SPAN=_SPAN,
        ALL_SPANS=triton.next_power_of_2(num_spans), PROGRAMS=triton.next_power_of_2(programs), CHUNK=_CHUNK,
        MOST_SPANS=_MOST_SPANS, MOST=_CANDIDATES, num_warps=_WARPS[1], **ways,
    )  # fmt: skip
    wide_kernel[(rows, wide_programs)](
        *shared, parts, out, arrived, whole, *sizes, wide_tiles, SHIFT=shift, TILE=_TILE, WEIGHED=_WEIGHED,
        STAGES=_STAGES[1],
        PROGRAMS=triton.next_power_of_2(wide_programs), num_warps=_WARPS[2], **ways,
    )  # fmt: skip


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


def _check_adjusted(adjusted: Adjusted, num_slots: int, vocab: int) -> None:
    _check_one("adjusted.row", adjusted.row, (num_slots,), (torch.int32,))
    given = adjusted.logits
    if given.dtype != torch.float32 or given.ndim != 2 or given.shape[1] != vocab or given.stride(1) != 1:
        raise ValueError(f"adjusted: expected float32 rows of {vocab}, got {given.dtype} {list(given.shape)}")


def _check_one(name: str, one: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if one.shape != shape or one.dtype not in dtypes or not one.is_contiguous():
        raise ValueError(f"{name}: expected contiguous {list(shape)} of {dtypes}, got {list(one.shape)} of {one.dtype}")

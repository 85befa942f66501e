"""Draws a token a row without sorting, in four kernels of fixed grids: for CUDA graphs.

Every limit (min-p, top-k, top-p) keeps the tokens from some logit upwards. The first kernel (`draw_scan`) reads all
logits once and leaves the largest of each span of tokens and, where nothing is limited, which spans can hold the token
that wins with its noise. The second (`draw_choose`), a program a row, reads few spans again: those that can hold a
token that is kept, or the winner. Rows with too many tokens to keep for that go to the others (`draw_wide`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl
from blockyard.kernels.sampling.sample_large_nucleus import sample_large_nucleus_kernel, sample_noise_kernel
from blockyard.kernels.sampling.sample_scan import sample_scan_kernel
from blockyard.kernels.sampling.sample_select import sample_select_kernel

_LANES = 128  # of a tile: the first and third kernel's threads
_RUNS = 4  # of 8 tokens that a lane has in a tile
_CHANCES = 16.0  # tokens that may have noise enough, on average: none of them wins in one draw of exp(16)
_CHUNK = 64  # spans that are read again at once
_FEW = 32  # the same in the third kernel
_MOST_SPANS = 1024  # that are read again; at least _LANES
_CANDIDATES = 2048  # tokens among which the exact threshold is looked for
_STEPS = 5  # of the search for the logit from which on spans are read again
_TILE = 1024  # tokens that get noise at once where one program draws alone
_PROGRAMS = 8 * 132  # of the first kernel, at most
_WIDE_PROGRAMS = 8 * 132  # of the fourth
_WARPS = (4, 8, 4, 4)  # of the four kernels
_REGISTERS = (64, 128, None, 64)  # a thread of each has at most
_EARLY = True  # all kernels but the first are set up while the one before them ends, where the GPU can
_STAGES = 1  # loads under way in the fourth kernel
_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # low bits of a key that are always the same


@dataclass(frozen=True, slots=True)
class SamplingTensors:
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
class AdjustedLogits:
    """Logits that count in place of the raw ones, of the slots that have such a row."""

    row: Tensor  # [num_slots] int32; below 0: none
    logits: Tensor  # [adjusted rows, vocab] float32, rows may be strided


def sample_tokens(
    logits: Tensor,
    slots: Tensor,
    index: Tensor,
    params: SamplingTensors,
    tokens: Tensor,
    best: Tensor,
    adjusted: AdjustedLogits | None = None,
    batch_invariant: bool = False,
) -> None:
    """logits [rows, vocab] bfloat16, float16 or float32, rows may be strided; slots [rows] int64, below 0: a row that
    pads; index [rows] int64, of the new token in its sequence, the noise's counter; adjusted: see `penalize_logits`.

    Writes tokens [rows] int64 and best [rows] float32: what won with its noise, in no fixed scale (the logit itself
    where a slot is greedy). `best` is -inf where no token is allowed and NaN where a logit is NaN or +inf; the token
    is 0 then. Rows that pad get token 0 and best 0. Among equal values the lowest token wins; tokens as likely as the
    last one that top-k or top-p keeps are kept. The last bits of a mass (1e-6 of it) follow from the number of rows
    unless `batch_invariant`. No host sync, grids of the shapes alone: for CUDA graphs. Slots must lie below num_slots:
    not checked on device. Raises ValueError for other shapes and dtypes.
    """
    rows, vocab = logits.shape
    _check_inputs(logits, slots, index, tokens, best)
    params.check()
    if adjusted is not None:
        _check_adjusted(adjusted, params.temperature.shape[0], vocab)
    if rows == 0:
        return
    num_tiles = ceil_div(vocab, _LANES * _RUNS * 8)
    num_spans = num_tiles * _LANES
    sharing = 1 if batch_invariant else rows
    tiles, programs = _split(num_tiles, _PROGRAMS // sharing)
    wide_tiles, wide_programs = _split(num_tiles, _WIDE_PROGRAMS // sharing)
    made = _Scratch(logits.device, rows)
    spans = made.floats(num_spans), made.make(torch.int8, num_spans)
    parts, limit = (made.floats(programs), made.floats(programs)), made.floats(1)
    lists = made.ints(_MOST_SPANS), made.floats(_CANDIDATES), made.ints(_CANDIDATES)
    wide, sums, arrived = (made.floats(4), made.ints(4), made.floats(1)), made.floats(wide_programs * 4), made.ints(2)
    settings = (params.temperature, params.top_k, params.top_p, params.min_p, params.key, params.choice)
    other = (slots, logits, 0) if adjusted is None else (adjusted.row, adjusted.logits, adjusted.logits.stride(0))
    shared, sizes = (logits, (slots, index), settings, other), (logits.stride(0), vocab, params.temperature.shape[0])
    out, shift, all_spans = (tokens, best), _SHIFT[logits.dtype], next_power_of_2(num_spans)
    most = next_power_of_2(num_tiles)  # programs a row; the same for all row counts: fewer kernels to compile
    early = _EARLY and supports_pdl(logits.device)
    ways = {"LANES": _LANES, "RUNS": _RUNS, "OTHER": adjusted is not None, "FAST": logits.is_cuda, "PDL": early}
    sample_scan_kernel[(rows, programs)](
        *shared, spans, parts, limit, *sizes, num_spans, tiles, CHANCES=_CHANCES, num_warps=_WARPS[0],
        maxnreg=_REGISTERS[0], **ways,
    )  # fmt: skip
    sample_select_kernel[(rows,)](
        *shared, spans, parts, limit, lists, wide[2], out, arrived, *sizes, num_spans, programs, SHIFT=shift,
        ALL_SPANS=all_spans, PROGRAMS=most, CHUNK=_CHUNK, MOST_SPANS=_MOST_SPANS, MOST=_CANDIDATES, STEPS=_STEPS,
        num_warps=_WARPS[1], maxnreg=_REGISTERS[1], **ways, **pdl_options(early),
    )  # fmt: skip
    sample_noise_kernel[(rows, programs)](
        *shared, spans[1], lists, wide, out, arrived, *sizes, num_spans, tiles, CHANCES=_CHANCES, ALL_SPANS=all_spans,
        CHUNK=_FEW, MOST_SPANS=_MOST_SPANS, num_warps=_WARPS[2], maxnreg=_REGISTERS[2], **ways, **pdl_options(early),
    )  # fmt: skip
    sample_large_nucleus_kernel[(rows, wide_programs)](
        *shared, wide, sums, out, arrived, *sizes, wide_tiles, SHIFT=shift, TILE=_TILE, STAGES=_STAGES,
        PROGRAMS=most, num_warps=_WARPS[3], maxnreg=_REGISTERS[3], **ways, **pdl_options(early),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What the kernels leave each other."""

    device: torch.device
    rows: int

    def make(self, dtype: torch.dtype, width: int) -> Tensor:
        return torch.empty((self.rows, width), dtype=dtype, device=self.device)

    def floats(self, width: int) -> Tensor:
        return self.make(torch.float32, width)

    def ints(self, width: int) -> Tensor:
        return self.make(torch.int32, width)


def _split(tiles: int, programs: int) -> tuple[int, int]:
    """How many tiles a program of a row has, and the number of programs, `programs` at most."""
    each = ceil_div(tiles, max(1, min(tiles, programs)))
    return each, ceil_div(tiles, each)


def _check_inputs(logits: Tensor, slots: Tensor, index: Tensor, tokens: Tensor, best: Tensor) -> None:
    rows = logits.shape[0]
    if logits.dtype not in _SHIFT or logits.stride(1) != 1 or logits.shape[1] == 0:
        raise ValueError(f"expected rows of float logits, got {logits.dtype}, {logits.shape}, {logits.stride()}")
    for name, one in (("slots", slots), ("index", index), ("tokens", tokens)):
        _check_one(name, one, (rows,), (torch.int64,))
    _check_one("best", best, (rows,), (torch.float32,))


def _check_adjusted(adjusted: AdjustedLogits, num_slots: int, vocab: int) -> None:
    _check_one("adjusted.row", adjusted.row, (num_slots,), (torch.int32,))
    given = adjusted.logits
    if given.dtype != torch.float32 or given.ndim != 2 or given.shape[1] != vocab or given.stride(1) != 1:
        raise ValueError(f"adjusted: expected float32 rows of {vocab}, got {given.dtype} {list(given.shape)}")


def _check_one(name: str, one: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if one.shape != shape or one.dtype not in dtypes or not one.is_contiguous():
        raise ValueError(f"{name}: expected contiguous {list(shape)} of {dtypes}, got {list(one.shape)} of {one.dtype}")

"""Samples one token a row without sorting, in four kernels with fixed grids: for CUDA graphs.

Every limit (min-p, top-k, top-p) keeps the tokens above some logit, and the sampled token is the one with the largest
logit plus Gumbel noise (Gumbel-max). The first kernel (`sample_scan`) reads all logits once and stores the largest of
each span of tokens and, for rows without limits, the spans that can hold the winner. The second (`sample_select`), one
program a row, reads few spans again. Rows with limits that keep too many tokens for that go to `sample_large_nucleus`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl
from blockyard.kernels.sampling.philox_gumbel import gumbel_rows
from blockyard.kernels.sampling.sample_large_nucleus import sample_large_nucleus_kernel, sample_noise_kernel
from blockyard.kernels.sampling.sample_scan import sample_scan_kernel
from blockyard.kernels.sampling.sample_select import sample_select_kernel
from blockyard.kernels.sampling.sampling_state import AdjustedLogits, SamplingTensors
from blockyard.kernels.tensor_checks import check_tensor

_LANES = 128  # of a tile: threads of the scan and noise kernels
_RUNS = 4  # runs of 8 tokens of a lane in a tile
_EXPECTED_CANDIDATES = 16.0  # with so many expected candidates, the winner is none of them with probability exp(-16)
_CHUNK = 64  # spans that the select kernel reads at once
_FEW = 32  # spans that the noise kernel reads at once
_MAX_SPANS = 1024  # spans in a list; at least _LANES
_CANDIDATES = 2048  # tokens in a list, among which the exact threshold is searched
_STEPS = 5  # bisections for the logit above which spans are listed
_TILE = 1024  # tokens that the fallback perturbs at once
_PROGRAMS = 8 * 132  # of the scan and noise kernels, at most
_WIDE_PROGRAMS = 8 * 132  # of the last kernel, at most
_WARPS = (4, 8, 4, 4)  # of each kernel
_REGISTERS = (64, 128, None, 64)  # of a thread of each kernel, at most
_STAGES = 1  # pipeline stages of the last kernel
# low bits of an ordered integer that are always the same
_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


def sample_tokens_reference(
    logits: Tensor, slots: Tensor, index: Tensor, params: SamplingTensors
) -> tuple[Tensor, Tensor]:
    """Tokens [rows] and winning values [rows] by sorting, in the precision of `logits`, on any device."""
    tokens = torch.zeros_like(slots)
    best = torch.zeros(len(slots), dtype=logits.dtype, device=logits.device)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        values = logits[row]
        if params.temperature[slot] >= 1e-5:
            key = params.key[:, slot : slot + 1].long() & 0xFFFFFFFF
            noise = gumbel_rows(key, index[row : row + 1], params.choice[slot : slot + 1].long(), len(values))[0]
            logs = (values / params.temperature[slot].to(values.dtype)).log_softmax(-1)
            kept = _kept_reference(logs, params, slot)
            values = torch.where(kept, logs + noise, float("-inf"))
        best[row], tokens[row] = values.max(-1)
    return tokens, best


def _kept_reference(logs: Tensor, params: SamplingTensors, slot: int) -> Tensor:
    """Which of logs [vocab] the limits keep: min-p, then top-k, then top-p of the remaining mass. Ties are kept
    together.
    """
    order = logs.sort(descending=True).values
    kept = logs >= order[0] + params.min_p[slot].log()
    kept &= logs >= order[min(int(params.top_k[slot]), len(order)) - 1]
    if params.top_p[slot] < 1:
        shares = torch.where(kept, logs.exp(), 0.0)
        ranked = shares.sort(descending=True).values
        before = ranked.cumsum(-1) - ranked
        inside = before < params.top_p[slot] * shares.sum()
        kept &= shares >= ranked[inside].min()
    return kept


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
    """logits [rows, vocab] bfloat16, float16 or float32, rows may be strided -> tokens [rows] int64, best [rows]
    float32.

    slots [rows] int64, below 0 for padding rows; index [rows] int64, the new token's index in its sequence, which is
    the noise's counter. best is the winner's perturbed logit, in no fixed scale (for greedy slots the logit itself). It
    is -inf where no token is allowed and NaN where a logit is NaN or +inf; the token is 0 then. Padding rows get token
    0 and best 0. Among equal values the lowest token wins. Tokens as likely as the last one that top-k or top-p keeps
    are kept. The last bits of a mass (1e-6 of it) depend on the number of rows unless `batch_invariant`. There is no
    host sync, and grids follow from shapes alone. Slots must lie below num_slots: not checked on device. Raises
    ValueError for other shapes and dtypes.
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
    tiles, programs = split_tiles(num_tiles, _PROGRAMS // sharing)
    wide_tiles, wide_programs = split_tiles(num_tiles, _WIDE_PROGRAMS // sharing)
    made = _Scratch(logits.device, rows)
    spans = made.floats(num_spans), made.make(torch.int8, num_spans)
    parts, limit = (made.floats(programs), made.floats(programs)), made.floats(1)
    lists = made.ints(_MAX_SPANS), made.floats(_CANDIDATES), made.ints(_CANDIDATES)
    large_nucleus, sums, semaphores = (
        (made.floats(4), made.ints(4), made.floats(1)),
        made.floats(wide_programs * 4),
        made.ints(2),
    )
    limits = (params.temperature, params.top_k, params.top_p, params.min_p, params.key, params.choice)
    replaced = (slots, logits, 0) if adjusted is None else (adjusted.row, adjusted.logits, adjusted.logits.stride(0))
    shared, sizes = (logits, (slots, index), limits, replaced), (logits.stride(0), vocab, params.temperature.shape[0])
    out, shift, all_spans = (tokens, best), _SHIFT[logits.dtype], next_power_of_2(num_spans)
    max_programs = next_power_of_2(num_tiles)  # a row; the same for all row counts, so that fewer kernels are compiled
    pdl = supports_pdl(logits.device)  # all kernels but the first use programmatic dependent launch
    constants = {"LANES": _LANES, "RUNS": _RUNS, "ADJUSTED": adjusted is not None, "FAST": logits.is_cuda, "PDL": pdl}
    sample_scan_kernel[(rows, programs)](
        *shared, spans, parts, limit, *sizes, num_spans, tiles,
        EXPECTED_CANDIDATES=_EXPECTED_CANDIDATES, num_warps=_WARPS[0], maxnreg=_REGISTERS[0], **constants,
    )  # fmt: skip
    sample_select_kernel[(rows,)](
        *shared, spans, parts, limit, lists, large_nucleus[2], out, semaphores, *sizes, num_spans, programs,
        SHIFT=shift, ALL_SPANS=all_spans, PROGRAMS=max_programs, CHUNK=_CHUNK, MAX_SPANS=_MAX_SPANS,
        MAX_CANDIDATES=_CANDIDATES, STEPS=_STEPS, num_warps=_WARPS[1], maxnreg=_REGISTERS[1], **constants,
        **pdl_options(pdl),
    )  # fmt: skip
    sample_noise_kernel[(rows, programs)](
        *shared, spans[1], lists, large_nucleus, out, semaphores, *sizes, num_spans, tiles,
        EXPECTED_CANDIDATES=_EXPECTED_CANDIDATES, ALL_SPANS=all_spans, CHUNK=_FEW, MAX_SPANS=_MAX_SPANS,
        num_warps=_WARPS[2], maxnreg=_REGISTERS[2], **constants, **pdl_options(pdl),
    )  # fmt: skip
    sample_large_nucleus_kernel[(rows, wide_programs)](
        *shared, large_nucleus, sums, out, semaphores, *sizes, wide_tiles,
        SHIFT=shift, TILE=_TILE, STAGES=_STAGES, PROGRAMS=max_programs, num_warps=_WARPS[3], maxnreg=_REGISTERS[3],
        **constants, **pdl_options(pdl),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Allocates the buffers by which the kernels pass results to each other."""

    device: torch.device
    rows: int

    def make(self, dtype: torch.dtype, width: int) -> Tensor:
        return torch.empty((self.rows, width), dtype=dtype, device=self.device)

    def floats(self, width: int) -> Tensor:
        return self.make(torch.float32, width)

    def ints(self, width: int) -> Tensor:
        return self.make(torch.int32, width)


def split_tiles(tiles: int, programs: int) -> tuple[int, int]:
    """The number of tiles of a program, and of programs, which is at most `programs`, for one row."""
    each = ceil_div(tiles, max(1, min(tiles, programs)))
    return each, ceil_div(tiles, each)


def _check_inputs(logits: Tensor, slots: Tensor, index: Tensor, tokens: Tensor, best: Tensor) -> None:
    rows = logits.shape[0]
    if logits.dtype not in _SHIFT or logits.stride(1) != 1 or logits.shape[1] == 0:
        raise ValueError(f"expected rows of float logits, got {logits.dtype}, {logits.shape}, {logits.stride()}")
    for name, one in (("slots", slots), ("index", index), ("tokens", tokens)):
        check_tensor(name, one, (rows,), torch.int64)
    check_tensor("best", best, (rows,), torch.float32)


def _check_adjusted(adjusted: AdjustedLogits, num_slots: int, vocab: int) -> None:
    check_tensor("adjusted.row", adjusted.row, (num_slots,), torch.int32)
    given = adjusted.logits
    if given.dtype != torch.float32 or given.ndim != 2 or given.shape[1] != vocab or given.stride(1) != 1:
        raise ValueError(f"adjusted: expected float32 rows of {vocab}, got {given.dtype} {list(given.shape)}")

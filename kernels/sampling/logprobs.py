"""Log-probabilities of sampled tokens, their ranks and the likeliest tokens, of raw logits; for CUDA graphs.

The first kernel reads a row once, in several programs: the largest logit and the mass of each span of tokens, and how
many logits are above the sampled token's. The second takes the likeliest tokens one by one from the spans with the
largest logits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.sampling.sampling_state import MAX_LOGPROBS, LogprobsTensors
from blockyard.kernels.tensor_checks import check_tensor

_SPAN = 128  # tokens
_SPANS = 32  # spans of a program of the first kernel


@triton.jit
def _logsumexp_kernel(
    logits_ptr, slots_ptr, tokens_ptr, num_top_ptr, top_ptr, mass_ptr, above_ptr, stride, vocab, num_spans,
    SPAN: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    # program (i, j): tile j of row i
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if tl.load(num_top_ptr + slot, mask=slot >= 0, other=-1) < 0:
        return
    spans = tl.program_id(1) * SPANS + tl.arange(0, SPANS)
    cols = spans[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    logits_ptr += row * stride
    chosen = tl.load(logits_ptr + tl.load(tokens_ptr + row)).to(tl.float32)
    x = tl.load(logits_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 1)
    mass = tl.sum(tl.exp(x - tl.maximum(top, -3e38)[:, None]), 1)  # a span of -inf alone has no mass
    tl.store(top_ptr + row * num_spans + spans, top, mask=spans < num_spans)
    tl.store(mass_ptr + row * num_spans + spans, mass, mask=spans < num_spans)
    above = tl.sum(tl.sum((x > chosen).to(tl.int32), 1), 0)
    tl.store(above_ptr + row * tl.num_programs(1) + tl.program_id(1), above)


@triton.jit
def _topk_logprobs_kernel(
    logits_ptr, slots_ptr, tokens_ptr, num_top_ptr, top_ptr, mass_ptr, above_ptr, out, stride, vocab, num_spans,
    programs, most,
    SPAN: tl.constexpr, ALL_SPANS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    # program i: row i
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    num_top = tl.load(num_top_ptr + slot, mask=slot >= 0, other=-1)
    if num_top < 0:
        return
    logprob_ptr, rank_ptr, ids_ptr, logprobs_ptr = out
    logits_ptr += row * stride
    spans = tl.arange(0, ALL_SPANS)
    tops = tl.load(top_ptr + row * num_spans + spans, mask=spans < num_spans, other=float("-inf"))
    mass = tl.load(mass_ptr + row * num_spans + spans, mask=spans < num_spans, other=0.0)
    top = tl.max(tops, 0)
    whole = top + tl.log(tl.sum(mass * tl.exp(tops - top), 0))
    parts = tl.arange(0, PROGRAMS)
    above = tl.load(above_ptr + row * programs + parts, mask=parts < programs, other=0)
    chosen = tl.load(logits_ptr + tl.load(tokens_ptr + row)).to(tl.float32)
    tl.store(logprob_ptr + row, chosen - whole)
    tl.store(rank_ptr + row, tl.sum(above, 0) + 1)
    taken = tl.full([ALL_SPANS], -1, tl.int32)  # per span: the last token taken that has its largest logit
    for i in range(0, tl.minimum(num_top, tl.minimum(most, vocab))):
        value = tl.max(tops, 0)
        span = tl.min(tl.where(tops == value, spans, ALL_SPANS - 1), 0)
        last = tl.max(tl.where(spans == span, taken, -1), 0)
        cols = span * SPAN + tl.arange(0, SPAN)
        x = tl.load(logits_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)
        left = (x == value) & (cols > last) & (cols < vocab)
        token = tl.min(tl.where(left, cols, vocab - 1), 0)
        tl.store(ids_ptr + row * most + i, token)
        tl.store(logprobs_ptr + row * most + i, value - whole)
        more = tl.max((left & (cols > token)).to(tl.int32), 0) > 0
        lower = tl.max(tl.where(x < value, x, float("-inf")), 0)
        tops = tl.where((spans == span) & (not more), lower, tops)
        taken = tl.where(spans == span, tl.where(more, token, -1), taken)


def gather_logprobs(logits: Tensor, slots: Tensor, tokens: Tensor, num_top: Tensor, out: LogprobsTensors) -> None:
    """logits [rows, vocab] of the model, rows may be strided -> `out`, in the rows whose slots ask for
    log-probabilities.

    slots [rows] int64, below 0 for padding rows; tokens [rows] int64, the sampled ones; num_top [num_slots] int32: how
    many top log-probabilities a slot asks for, below 0: none, and not the sampled token's either. Other rows of `out`
    stay as they are. Log-probabilities are NaN where a logit is NaN or +inf. Raises ValueError for other shapes and
    dtypes.
    """
    rows, vocab = logits.shape
    most = out.top_ids.shape[1]
    if logits.stride(1) != 1 or most > MAX_LOGPROBS:
        raise ValueError(f"expected contiguous elements and up to {MAX_LOGPROBS} ids: {logits.stride()}, {most}")
    for name, one, shape, dtype in (
        ("slots", slots, (rows,), torch.int64),
        ("tokens", tokens, (rows,), torch.int64),
        ("num_top", num_top, (num_top.shape[0],), torch.int32),
        ("logprob", out.logprob, (rows,), torch.float32),
        ("rank", out.rank, (rows,), torch.int32),
        ("top_ids", out.top_ids, (rows, most), torch.int32),
        ("top_logprobs", out.top_logprobs, (rows, most), torch.float32),
    ):
        check_tensor(name, one, shape, dtype)
    if rows == 0:
        return
    num_spans = ceil_div(vocab, _SPAN)
    programs = ceil_div(num_spans, _SPANS)
    top, mass = torch.empty((2, rows, num_spans), dtype=torch.float32, device=logits.device)
    above = torch.empty((rows, programs), dtype=torch.int32, device=logits.device)
    given = (logits, slots, tokens, num_top, top, mass, above)
    _logsumexp_kernel[(rows, programs)](*given, logits.stride(0), vocab, num_spans, SPAN=_SPAN, SPANS=_SPANS)
    _topk_logprobs_kernel[(rows,)](
        *given, (out.logprob, out.rank, out.top_ids, out.top_logprobs), logits.stride(0), vocab, num_spans, programs,
        most, SPAN=_SPAN, ALL_SPANS=next_power_of_2(num_spans), PROGRAMS=next_power_of_2(programs),
    )  # fmt: skip

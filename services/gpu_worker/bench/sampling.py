"""Times the sampling kernels: draws, penalties and logprobs. The lower bound of each is one pass over its memory."""

from functools import partial

import torch
from torch import Tensor

from blockyard.kernels.sampling.logprobs import gather_logprobs
from blockyard.kernels.sampling.penalize_logits import penalize_logits
from blockyard.kernels.sampling.sample_tokens import sample_tokens
from blockyard.kernels.sampling.sampling_state import LogprobsTensors, SamplingTensors, count_known, make_logits_edits
from blockyard.services.gpu_worker.bench.row import Row, row
from blockyard.services.gpu_worker.bench.timing import DEVICE, copies, graph_seconds

VOCAB = 128256
DTYPE = torch.bfloat16
ROWS = (1, 64, 256)
ALL = 2**30


def peaked(rows: int, num: int, high: float, spread: float) -> Tensor:
    """Makes logits like the output of a trained model: `num` likely tokens, all others unlikely."""
    logits = 2 * torch.randn(rows, VOCAB)
    likely = torch.randint(0, VOCAB, (rows, num))
    return logits.scatter_(1, likely, high + spread * torch.randn(rows, num)).to(DTYPE)


def flat(rows: int) -> Tensor:
    """Makes logits like the output of random weights: all tokens are likely."""
    return torch.randn(rows, VOCAB).to(DTYPE)


def measure() -> list[Row]:
    torch.manual_seed(0)
    with torch.inference_mode(), torch.device(DEVICE):
        return [one for rows in ROWS for one in (*_draws(rows), _penalties(rows), _logprobs(rows))]


def _draws(rows: int) -> list[Row]:
    cases = {
        "draw, greedy": ("peaked", {"temperature": 0.0}),
        "draw, top-p 0.9, nucleus of 17": ("peaked", {"top_p": 0.9}),
        "draw, top-p 0.9, nucleus of 325": ("broad", {"top_p": 0.9}),
        "draw, top-p 0.9, nucleus of 5,600": ("spread", {"top_p": 0.9}),
        "draw, top-p 0.9, nucleus of 78,000": ("flat", {"top_p": 0.9}),
        "draw, top-k 50, top-p 0.9": ("peaked", {"top_k": 50.0, "top_p": 0.9}),
        "draw, min-p 0.05": ("peaked", {"min_p": 0.05}),
        "draw, no limit": ("flat", {}),
    }
    num = copies(rows * VOCAB * 2)
    logits = {
        "peaked": [peaked(rows, 60, 14, 2) for _ in range(num)],
        "broad": [peaked(rows, 600, 13, 1.2) for _ in range(num)],
        "spread": [flat(rows) * 3 for _ in range(num)],
        "flat": [flat(rows) for _ in range(num)],
    }
    slots, index = torch.randperm(rows), torch.randint(0, 2**17, (rows,))
    tokens, best = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows)
    measured = []
    for name, (kind, values) in cases.items():
        params = _params(rows, values)
        calls = [partial(sample_tokens, x, slots, index, params, tokens, best) for x in logits[kind]]
        measured.append(row(name, f"{rows} x {VOCAB}", graph_seconds(calls), rows * VOCAB * 2))
    return measured


def _params(rows: int, values: dict[str, float]) -> SamplingTensors:
    def full(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), values.get(name, default), dtype=dtype)

    return SamplingTensors(
        temperature=full("temperature", 1.0, torch.float32),
        top_k=full("top_k", ALL, torch.int32),
        top_p=full("top_p", 1.0, torch.float32),
        min_p=full("min_p", 0.0, torch.float32),
        key=torch.randint(0, 2**32, (2, rows)),
        choice=full("choice", 0, torch.int32),
    )


def _penalties(rows: int) -> Row:
    """Times penalties on all rows: reads logits and counts, writes adjusted logits."""
    logits = [flat(rows) for _ in range(copies(rows * VOCAB * 10))]
    edits = make_logits_edits(rows, rows, 64, VOCAB, torch.device(DEVICE))
    edits.row.copy_(torch.arange(rows))
    edits.repetition.fill_(1.2)
    for counts in edits.counts:
        count_known(counts, torch.randint(0, VOCAB, (1000,)), 500)
    slots = torch.arange(rows)
    seconds = graph_seconds([partial(penalize_logits, x, slots, slots, edits) for x in logits])
    return row("penalties", f"{rows} x {VOCAB}", seconds, rows * VOCAB * 10)


def _logprobs(rows: int) -> Row:
    """Times logprobs on all rows: logprob and rank of the token, and the top 5."""
    logits = [peaked(rows, 60, 14, 2) for _ in range(copies(rows * VOCAB * 2))]
    slots, tokens = torch.arange(rows), torch.randint(0, VOCAB, (rows,))
    num_top = torch.full((rows,), 5, dtype=torch.int32)
    out = LogprobsTensors(
        logprob=torch.zeros(rows),
        rank=num_top.clone(),
        top_ids=torch.zeros(rows, 5, dtype=torch.int32),
        top_logprobs=torch.zeros(rows, 5),
    )
    seconds = graph_seconds([partial(gather_logprobs, x, slots, tokens, num_top, out) for x in logits])
    return row("log-probability, rank, top 5", f"{rows} x {VOCAB}", seconds, rows * VOCAB * 2)

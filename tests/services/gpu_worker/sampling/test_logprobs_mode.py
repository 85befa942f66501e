"""--logprobs-mode: what is reported beside a sampled token, compared with a computation in float64."""

import math

import numpy as np
import pytest
import torch

from blockyard.services.gpu_worker.host_link import SameMemory
from blockyard.services.gpu_worker.sampling.host_rows import HostRows
from blockyard.shared.config.services.worker import LogprobsMode
from blockyard.shared.messages import Sampling, TokenLogprobs

from .test_cpu_sampler import EOS, NEG, VOCAB, Bench

LEAST = -9999.0
LIMITS = {"temperature": 0.5, "top_k": 6, "top_p": 0.9, "min_p": 0.02, "logit_bias": [(3, 4.0)]}


def reported(mode: LogprobsMode, logits: torch.Tensor, *samplings: Sampling) -> list[TokenLogprobs]:
    bench = Bench("host")
    bench.host = HostRows(VOCAB, [EOS], torch.device("cpu"), None, SameMemory().stream(), False, mode)
    for sampling in samplings:
        bench.add(sampling, [1, 2])
    sampled = bench.sample(logits)
    assert [sampled.token_ids[i] for i in sampled.logprobs] == [sampled.logprobs[i].token_id for i in sampled.logprobs]
    return [sampled.logprobs[i] for i in range(len(samplings))]


def log_softmax(x: list[float]) -> list[float]:
    most = max(x)
    total = math.log(sum(math.exp(v - most) for v in x)) + most
    return [v - total for v in x]


def processed(logits: torch.Tensor) -> list[float]:
    """Bias, temperature, min-p, top-k and top-p of LIMITS, one after the other."""
    x = logits.double().tolist()
    x[3] += 4.0
    x = [v / 0.5 for v in x]
    p = [math.exp(v) for v in log_softmax(x)]
    least = sorted(p)[-6]
    kept = {t for t in range(VOCAB) if p[t] >= 0.02 * max(p) and p[t] >= least}
    total, before = sum(p[t] for t in kept), 0.0
    for t in sorted(kept, key=lambda t: -p[t]):
        if before >= 0.9 * total:
            kept.discard(t)
        before += p[t]
    return [v if t in kept else NEG for t, v in enumerate(x)]


@pytest.mark.parametrize("mode", list(LogprobsMode))
def test_values_of_a_limited_row_beside_a_greedy_one(mode: LogprobsMode) -> None:
    torch.manual_seed(3)
    logits = torch.randn(2, VOCAB) * 2
    limited, greedy = reported(
        mode,
        logits,
        Sampling(max_tokens=9, num_logprobs=8, seed=5, **LIMITS),
        Sampling(max_tokens=9, temperature=0.0, num_logprobs=8),
    )
    raw = [row.double().tolist() for row in logits]
    expected = {
        LogprobsMode.RAW_LOGPROBS: [log_softmax(raw[0]), log_softmax(raw[1])],
        LogprobsMode.RAW_LOGITS: raw,
        LogprobsMode.PROCESSED_LOGPROBS: [log_softmax(processed(logits[0])), log_softmax(raw[1])],
        LogprobsMode.PROCESSED_LOGITS: [processed(logits[0]), raw[1]],
    }[mode]
    for found, exact in zip((limited, greedy), expected, strict=True):
        values = [max(v, LEAST) for v in exact]
        assert found.logprob == pytest.approx(values[found.token_id], abs=1e-4)
        best = sorted(values, reverse=True)[:8]
        assert found.top_logprobs == pytest.approx(best, abs=1e-4)
        assert found.rank == 1 + sum(v > values[found.token_id] for v in values)


def test_tokens_that_cannot_be_drawn_are_finite() -> None:
    logits = torch.randn(1, VOCAB)
    sampling = Sampling(max_tokens=9, num_logprobs=4, top_k=2, seed=1)
    (found,) = reported(LogprobsMode.PROCESSED_LOGPROBS, logits, sampling)
    assert found.top_logprobs[2:] == [LEAST, LEAST]
    assert np.exp(found.top_logprobs[:2]).sum() == pytest.approx(1.0, abs=1e-5)


def test_the_mode_changes_no_token() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, VOCAB)
    sampling = Sampling(max_tokens=9, num_logprobs=2, seed=11, **LIMITS)
    assert len({reported(mode, logits, sampling)[0].token_id for mode in LogprobsMode}) == 1

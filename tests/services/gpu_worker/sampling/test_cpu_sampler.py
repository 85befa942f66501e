"""Sampling on both devices and on the host, compared with a plain loop over one row, and each parameter alone."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_ops import ReferenceOps
from torch import Tensor

from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.sampling.philox_gumbel import gumbel_rows, split_seed
from blockyard.kernels.slots.slot_state import StepInputs
from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.execution.cuda.decode_graphs import DecodeSettings, DecodeSteps
from blockyard.services.gpu_worker.execution.cuda.device_ops import DeviceOps
from blockyard.services.gpu_worker.host_link import SameMemory
from blockyard.services.gpu_worker.layers.attention import AttentionShape
from blockyard.services.gpu_worker.sampling import topk_topp_sampler
from blockyard.services.gpu_worker.sampling.cpu_sampler import CpuSampler, SampledRows
from blockyard.services.gpu_worker.sampling.host_rows import HostRows, Sampled
from blockyard.services.gpu_worker.sampling.logits_steps import unsupported_reason
from blockyard.services.gpu_worker.slots import NONE_ALLOWED, NOT_FINITE, Problem, Slots
from blockyard.services.gpu_worker.startup.cuda_link import CudaLink
from blockyard.shared.messages import Sampling, SlotStart, StepPlan

VOCAB, EOS = 500, 7
NEG = -math.inf


class Bench:
    """Slots without a model; `add` starts a slot of which all tokens but the last are computed.

    how: cpu: rows of a step on the CPU. gpu: of a step on a GPU, with the kernels, or their references where there is
    no GPU. host: rows that only the host can sample. Others that need it are the host's, too.
    """

    def __init__(self, how: str, capacity: int = 16) -> None:
        device = torch.device("cuda" if how == "gpu" and torch.cuda.is_available() else "cpu")
        self.how, self.device = how, device
        self.slots = Slots(2 * capacity, max_model_len=64, block_size=16, vocab_size=VOCAB, num_blocks=100)
        shape = SimpleNamespace(
            attention=[AttentionShape(num_heads=2, kv_heads=2, head_dim=16, rules=ScoreRules(scale=1.0))],
            vocab_size=VOCAB,
        )
        pool: Any = SimpleNamespace(shape=shape, device=device, block_size=16)
        settings = DecodeSettings(capacity=capacity, max_model_len=64, eos_token_ids=[EOS], logits_edits=True)
        ops = ReferenceOps() if device.type == "cpu" else DeviceOps()
        link = CudaLink(device) if device.type == "cuda" else SameMemory()
        model: Any = SimpleNamespace(table=SimpleNamespace(link=link))
        self.steps = DecodeSteps(model, pool, settings, ops)
        self.device_slots = self.steps.slots
        self.edits = self.device_slots.logits_edits
        self.cpu = CpuSampler(self.edits, VOCAB, None)
        self.host = HostRows(VOCAB, [EOS], torch.device("cpu"), None, SameMemory().stream(), False)
        self.used: list[int] = []
        self.starts: list[SlotStart] = []

    def add(self, sampling: Sampling, prompt: list[int], output: tuple[int, ...] = (), choice: int = 0) -> None:
        slot = len(self.used) * 2 + 1  # rows and slots differ
        ids = np.array([*prompt, *output], "<u4").tobytes()
        start = SlotStart(slot, ids, len(prompt), len(prompt) + len(output) - 1, [1, 2, 3], sampling, choice)
        assert self.slots.start(start)
        self.used.append(slot)
        self.starts.append(start)
        self.device_slots.apply(StepPlan(1, 1, [], [start], [], []), self.slots)

    def sample(self, logits: Tensor) -> Sampled:
        slots, found = np.array(self.used), Sampled([0] * len(self.used))
        on_device = self.device_slots.samples_on_device[slots] & (self.how != "host")
        for rows, sample in (
            (np.flatnonzero(on_device), self._on_cpu if self.how == "cpu" else self._on_gpu),
            (np.flatnonzero(~on_device), self._on_host),
        ):
            if len(rows):
                part = sample(logits[torch.from_numpy(rows)].clone(), slots[rows])
                for i, row in enumerate(rows.tolist()):
                    found.token_ids[row] = part.token_ids[i]
                    found.logprobs |= {row: part.logprobs[i]} if i in part.logprobs else {}
                    found.problems |= {row: part.problems[i]} if i in part.problems else {}
        return found

    def _on_host(self, logits: Tensor, slots: Ints) -> Sampled:
        return self.host.sample(logits, slots, self.slots)

    def _on_cpu(self, logits: Tensor, slots: Ints) -> Sampled:
        self._write()
        fields = self.device_slots.state.fields.numpy()
        rows = SampledRows(slots, fields, self.edits, VOCAB, np.array([EOS], np.int32))
        drawn = self.cpu.sample(logits, slots, self.slots.num_tokens[slots], rows)
        return Sampled(drawn.token_ids.tolist(), drawn.logprobs or {}, problems_of(drawn.best))

    def _on_gpu(self, logits: Tensor, slots: Ints) -> Sampled:
        self._write()
        index, at = (torch.from_numpy(one).to(self.device) for one in (self.slots.num_tokens[slots], slots))
        inputs = StepInputs(index, index - 1, at, index, at)
        self.steps.ring.take()
        self.steps.sample_rows(inputs, logits.to(self.device), needs_processing=True)
        tokens, best = self.steps._tokens[: len(slots)].tolist(), self.steps._best[: len(slots)].tolist()
        words, wanted = self.edits.buffer.cpu().numpy(), self.edits.num_logprobs
        logprobs = {
            row: self.edits.read_logprobs(words, row, tokens[row], wanted[slot])
            for row, slot in enumerate(slots.tolist())
            if slot in wanted
        }
        return Sampled(tokens, logprobs, problems_of(best))

    def _write(self) -> None:
        index, values = self.device_slots.take()
        arena = self.device_slots.state.arena
        arena[torch.from_numpy(index).long().to(self.device)] = torch.from_numpy(values).to(self.device)


def problems_of(best: list[float]) -> dict[int, Problem]:
    return {
        row: NONE_ALLOWED if value == NEG else NOT_FINITE for row, value in enumerate(best) if not math.isfinite(value)
    }


@pytest.fixture(params=["cpu", "gpu", "host"])
def how(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def reference(logits: torch.Tensor, start: SlotStart) -> int:
    """Samples one row, token by token, in the documented order."""
    s = start.sampling
    ids = np.frombuffer(start.token_ids, "<u4").tolist()
    output = ids[start.num_prompt_tokens :]
    x = logits.double().tolist()
    if s.allowed_token_ids:
        x = [v if t in s.allowed_token_ids else NEG for t, v in enumerate(x)]
    for phrase in s.bad_words:
        n = len(phrase) - 1
        if len(output) >= n and output[len(output) - n :] == phrase[:-1]:
            x[phrase[-1]] = NEG
    if len(output) < s.min_tokens:
        for t in [EOS, *s.stop_token_ids]:
            x[t] = NEG
    for t, v in s.logit_bias:
        x[t] += v
    for t in set(ids):
        x[t] = x[t] / s.repetition_penalty if x[t] > 0 else x[t] * s.repetition_penalty
    for t in set(output):
        x[t] -= s.frequency_penalty * output.count(t) + s.presence_penalty
    if s.temperature == 0:
        return int(np.argmax(x))
    x = [v / s.temperature for v in x]
    p = np.exp(np.array(x) - max(x))
    x = [v if q >= s.min_p * p.max() else NEG for v, q in zip(x, p, strict=True)]
    if 0 < s.top_k < VOCAB:
        least = sorted(x)[-s.top_k]
        x = [v if v >= least else NEG for v in x]
    p = np.exp(np.array(x) - max(x))
    p /= p.sum()
    before = 0.0
    for t in np.argsort(-p, kind="stable"):
        if before >= s.top_p:
            x[t] = NEG
        before += p[t]
    key = torch.tensor([split_seed(s.seed)]).T
    noise = gumbel_rows(key, torch.tensor([len(ids)]), torch.tensor([start.choice]), VOCAB)[0]
    return int(np.argmax(np.array(x) + noise.double().numpy()))


tokens = st.integers(0, VOCAB - 1)
samplings = st.builds(
    Sampling,
    max_tokens=st.just(99),
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 5, 40, 70, 300, 1000]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 1.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    seed=st.integers(0, 2**64 - 1),
    min_tokens=st.sampled_from([0, 3, 10]),
    stop_token_ids=st.lists(tokens, max_size=2),
    logit_bias=st.lists(st.tuples(tokens, st.sampled_from([-100.0, -3.0, 5.0])), max_size=3, unique_by=lambda x: x[0]),
    bad_words=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=3),
    allowed_token_ids=st.one_of(st.just([]), st.lists(tokens, min_size=30, max_size=100, unique=True)),
    num_logprobs=st.sampled_from([None, 0, 3]),
)


@pytest.mark.parametrize("how", ["cpu", "gpu", "host"])
@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    rows=st.lists(
        st.tuples(samplings, st.lists(st.integers(0, 9), max_size=6), st.integers(0, 3)), min_size=1, max_size=6
    ),
    spread=st.sampled_from([0.3, 2.0, 8.0]),
    seed=st.integers(0, 1000),
)
def test_a_mixed_batch_is_sampled_as_row_by_row(
    how: str, rows: list[tuple[Sampling, list[int], int]], spread: float, seed: int
) -> None:
    bench = Bench(how)
    for sampling, output, choice in rows:
        bench.add(sampling, [1, 2, 300], tuple(output), choice)
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * spread
    sampled = bench.sample(logits)
    assert sampled.problems == {}
    assert sampled.token_ids == [reference(logits[i], start) for i, start in enumerate(bench.starts)]
    for i, (sampling, _, _) in enumerate(rows):
        assert (i in sampled.logprobs) == (sampling.num_logprobs is not None)


def test_draws_follow_the_distribution() -> None:
    """Choices of one request are independent draws: their shares approach the softmax."""
    x = torch.tensor([2.0, 1.0, 0.0, -1.0] + [-30.0] * (VOCAB - 4))
    counts = np.zeros(VOCAB)
    n = 4000
    bench = Bench("cpu", capacity=200)
    for choice in range(200):
        bench.add(Sampling(max_tokens=9, temperature=1.0, seed=5), [1], (), choice)
    for step in range(n // 200):
        bench.slots.num_tokens[:] = 1 + step
        counts += np.bincount(bench.sample(x.expand(200, -1)).token_ids, minlength=VOCAB)
    expected = x.softmax(0).double().numpy()[:4] * n
    chi2 = float((((counts[:4] - expected) ** 2) / expected).sum())
    assert counts[4:].sum() == 0
    assert chi2 < 16.3  # 3 degrees of freedom, p = 0.001; the draw is seeded


def test_logprobs_are_of_the_raw_logits(how: str) -> None:
    bench = Bench(how)
    bench.add(Sampling(max_tokens=9, temperature=0.0, num_logprobs=2, logit_bias=[(9, 50.0)]), [1, 2])
    bench.add(Sampling(max_tokens=9, temperature=0.0), [1, 2])
    bench.add(Sampling(max_tokens=9, temperature=0.0, num_logprobs=0), [1, 2])
    logits = torch.randn(3, VOCAB)
    sampled = bench.sample(logits)
    raw = logits.log_softmax(-1)
    entry = sampled.logprobs[0]
    assert (sampled.token_ids[0], entry.token_id) == (9, 9)
    assert entry.logprob == pytest.approx(float(raw[0, 9]), abs=1e-6)
    assert entry.rank == int((raw[0] > raw[0, 9]).sum()) + 1
    assert entry.top_ids == raw[0].topk(2).indices.tolist()
    assert entry.top_logprobs == pytest.approx(raw[0].topk(2).values.tolist(), abs=1e-6)
    assert 1 not in sampled.logprobs
    assert (sampled.logprobs[2].rank, sampled.logprobs[2].top_ids) == (1, [])


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda x: x.fill_(float("nan")), "not finite"),
        (lambda x: x[3:4].fill_(float("inf")), "not finite"),
        (lambda x: x.fill_(NEG), "no token is allowed"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("where", ["cpu", "host"])  # of the kernels: tests/kernels/sampling
def test_a_row_that_cannot_be_sampled_fails_alone(
    break_it: Callable[[torch.Tensor], object], message: str, where: str, temperature: float
) -> None:
    bench = Bench(where)
    for _ in range(3):
        bench.add(Sampling(max_tokens=9, temperature=temperature, top_p=0.9), [1, 2])
    logits = torch.randn(3, VOCAB)
    break_it(logits[1])
    sampled = bench.sample(logits)
    assert list(sampled.problems) == [1]
    assert message in sampled.problems[1].cause
    assert sampled.problems[1].status == (500 if message == "not finite" else 400)


@pytest.mark.parametrize(
    ("prompt", "output", "phrase", "forbidden"),
    [
        ([1, 5, 6], (), [6, 7], False),  # it starts with the last prompt token
        ([1, 5], (6,), [5, 6, 7], False),  # it starts in the prompt
        ([1, 5], (6,), [6, 7], True),
        ([6], (5, 6), [5, 6, 7], True),
        ([6, 6], (6, 5), [6, 7], False),  # its prefix is in the output, but not at the end
        ([7], (), [7], True),  # one token is always banned
    ],
)
def test_bad_words_match_only_the_output(
    how: str, prompt: list[int], output: tuple[int, ...], phrase: list[int], forbidden: bool
) -> None:
    bench = Bench(how)
    bench.add(Sampling(max_tokens=9, temperature=0.0, bad_words=[phrase]), prompt, output)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 10.0, 5.0
    assert bench.sample(logits).token_ids == [8 if forbidden else 7]


def test_penalties_of_an_ended_slot_are_forgotten(how: str) -> None:
    bench = Bench(how)
    bench.add(Sampling(max_tokens=9, temperature=0.0, repetition_penalty=50.0), [3])
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 4] = 10.0, 5.0
    assert bench.sample(logits).token_ids == [4]
    for _ in range(20):  # rows of counts are used again: there are as many as rows of a step
        bench.slots.end(1)
        bench.device_slots.apply(StepPlan(1, 1, [1], [], [], []), bench.slots)
        bench.host.end(1)
        bench.used.clear()
        bench.add(Sampling(max_tokens=9, temperature=0.0, repetition_penalty=50.0), [5])
        assert bench.sample(logits).token_ids == [3]


def test_a_penalty_counts_the_tokens_of_each_step() -> None:
    """The same on both devices, without the host's help between steps."""
    for how in ("cpu", "gpu"):
        bench, tokens = Bench(how), []
        bench.add(Sampling(max_tokens=9, temperature=0.0, frequency_penalty=1.0), [3])
        logits = torch.zeros(1, VOCAB)
        logits[0, 3], logits[0, 4] = 3.5, 2.25
        for _ in range(6):
            tokens += bench.sample(logits).token_ids
            bench.slots.num_tokens[1] += 1
        assert tokens == [3, 3, 4, 3, 4, 3]


@pytest.mark.parametrize(("top_k", "top_p"), [(VOCAB, 0.5), (7, 1.0), (9, 0.4)])
def test_equal_logits_are_kept_together_on_every_path(
    top_k: int, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 40
    logits = torch.randint(-3, 4, (rows, VOCAB), generator=torch.Generator().manual_seed(3)).float()
    logits[:, 5] = 5.0
    limits = topk_topp_sampler.SamplingLimits(torch.full((rows,), top_k), torch.full((rows,), top_p), torch.zeros(rows))
    key = torch.tensor([split_seed(s) for s in range(rows)]).T
    drawn = []
    for candidates in (4, topk_topp_sampler.CANDIDATES, VOCAB):
        monkeypatch.setattr(topk_topp_sampler, "CANDIDATES", candidates)
        noise = topk_topp_sampler.Noise(key, torch.arange(rows), torch.zeros(rows).long())
        drawn.append(topk_topp_sampler.sample_limited(logits, limits, noise)[1].tolist())
    assert drawn[0] == drawn[1] == drawn[2]
    assert len({*drawn[0]}) > 20  # all tokens of the next value are kept


@pytest.mark.parametrize("how", ["cpu", "gpu", "host"])
def test_listed_tokens_are_reported_in_place_of_the_likeliest(how: str) -> None:
    """Rows with and without a list lie side by side; kernels have no part in those with one."""
    bench = Bench(how)
    bench.add(Sampling(max_tokens=9, temperature=0, num_logprobs=0, logprob_token_ids=[40, 3, 499]), [1, 2])
    bench.add(Sampling(max_tokens=9, temperature=0, num_logprobs=2), [1, 2])
    logits = torch.arange(2 * VOCAB, dtype=torch.float32).reshape(2, VOCAB) / 50
    sampled = bench.sample(logits)
    expected = logits[0].log_softmax(-1)
    listed, likeliest = sampled.logprobs[0], sampled.logprobs[1]
    assert listed.top_ids == [40, 3, 499] and likeliest.top_ids == [499, 498]
    assert listed.top_logprobs == pytest.approx([float(expected[i]) for i in (40, 3, 499)], abs=1e-4)
    assert (listed.token_id, listed.rank) == (499, 1) and sampled.token_ids == [499, 499]
    assert listed.logprob == pytest.approx(float(expected[499]), abs=1e-4)


def test_a_listed_token_outside_of_the_vocabulary_is_refused() -> None:
    assert "500 is outside" in unsupported_reason(Sampling(max_tokens=1, logprob_token_ids=[VOCAB]), VOCAB)

"""Batches against a ring in this process with a short queue, refusals, failures and a lost scheduler."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from fake_ring import CARD, SCHEDULER, FakeRing, member
from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard import RepetitionDetectionParams
from blockyard.services.offline.batch import OfflineRequest, RequestBatch, derived_seed
from blockyard.services.offline.inflight import InflightLimiter
from blockyard.services.offline.outputs import GenerationError
from blockyard.services.offline.prompts import read_prompts
from blockyard.services.offline.sampling_params import SamplingParams, read
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import (
    Cancel,
    FinishReason,
    Frame,
    Generate,
    QueueCapacity,
    QueueCapacityChanged,
    Refused,
    RepetitionDetection,
    Role,
    Tokenize,
)
from blockyard.shared.ring_client.client import RingClient

PATIENCE_S = 30.0
FULL = QueueCapacity(0, 0, retry_after_s=0.02)


class ShortQueue(FakeRing):
    """At most `most` requests at once; others get a 429."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.most_seen = 0
        self.num_refused = 0

    def admit(self, to: int, frame: Generate) -> None:
        if len(self.running) >= self.most:
            self.num_refused += 1
            self.receive(to, Refused(frame.request_id, frame.attempt, 429, "", "full", FULL))
            return
        self.capacity = QueueCapacity(self.most - len(self.running) - 1, 10_000, 0.02)
        super().admit(to, frame)
        self.most_seen = max(self.most_seen, len(self.running))

    def step(self) -> None:
        was_full = len(self.running) >= self.most
        super().step()
        if was_full and len(self.running) < self.most:
            self.receive(SCHEDULER, QueueCapacityChanged(QueueCapacity(self.most - len(self.running), 10_000)))


class Rig:
    def __init__(self, ring: FakeRing) -> None:
        self.ring = ring
        self.now: float | None = None  # None: the real clock
        self.client = RingClient(ring, ["tiny"], PATIENCE_S, self.clock)
        self.limiter = InflightLimiter(self.client, "tiny", PATIENCE_S)
        ring.receive = self.receive

    def clock(self) -> float:
        return asyncio.get_running_loop().time() if self.now is None else self.now

    def receive(self, peer: int, event: Any) -> None:
        self.client.handle(peer, event)
        self.limiter.send_pending()

    def batch(self, prompts: object, *params: SamplingParams) -> RequestBatch:
        read_ones = read_prompts(prompts, "tiny")
        params = [read(params[i % len(params)], CARD.vocab_size, 20) for i in range(len(read_ones))]
        requests = [
            OfflineRequest(p, a, derived_seed(0, i)) for i, (p, a) in enumerate(zip(read_ones, params, strict=True))
        ]
        return RequestBatch("b", requests, CARD, self.client, self.limiter)

    async def pumping(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            self.client.dispatch.retry(self.clock())
            self.limiter.send_pending()


def play(ring: FakeRing, scene: Callable[[Rig], Coroutine[Any, Any, None]]) -> Rig:
    """Runs the scene; then no request may be open."""

    async def run() -> Rig:
        rig = Rig(ring)
        ring.join_all()
        timers = asyncio.create_task(rig.pumping())
        async with asyncio.timeout(20):
            await scene(rig)
        timers.cancel()
        return rig

    rig = asyncio.run(run())
    assert rig.client.journal.entries == {}
    assert len(rig.limiter) == 0
    check_nothing_is_counted(rig)
    return rig


def check_nothing_is_counted(rig: Rig) -> None:
    """The scheduler is asked whether it takes the next request alone."""
    asked: list[tuple[int, int, bool]] = []

    def takes(model: str, choices: int, tokens: int, now: float, alone: bool) -> bool:
        asked.append((choices, tokens, alone))
        return False

    entry: Any = SimpleNamespace(
        request_id="next", choices=[None], num_prompt_tokens=3, request=SimpleNamespace(beam=None)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.client.schedulers, "of", lambda model: [SCHEDULER])
        patch.setattr(rig.client.schedulers, "takes", takes)
        patch.setattr(rig, "now", 0.0)
        rig.limiter.enqueue(entry)
        rig.limiter.send_pending()
    assert asked == [(1, 3, True)]


def sent(ring: FakeRing, kind: type[Frame]) -> list[Any]:
    return ring.frames(kind)


def test_outputs_are_in_the_order_of_the_prompts() -> None:
    async def scene(rig: Rig) -> None:
        rig.ring.script = lambda request_id, index: f"<{request_id}:{index}>"
        params = [SamplingParams(max_tokens=3 - i % 3, n=1 + i % 2) for i in range(6)]
        batch = rig.batch([f"prompt {i}" for i in range(40)], *params)
        await batch.run()
        for i, output in enumerate(batch.outputs):
            assert output is not None and output.finished and output.prompt == f"prompt {i}"
            assert bytes(output.prompt_token_ids) == f"prompt {i}".encode()
            assert [c.text for c in output.outputs] == ["".join(f"<b-{i}:{k}>" for k in range(3 - i % 3))] * (1 + i % 2)
            assert [c.finish_reason for c in output.outputs] == ["length"] * (1 + i % 2)
            assert output.num_cached_tokens == 3 and output.outputs[0].logprobs is None
        assert batch.progress.num_finished == batch.progress.num_tokenized == 40
        assert batch.progress.num_output_tokens == sum((3 - i % 3) * (1 + i % 2) for i in range(40))

    play(FakeRing(), scene)


def test_fields_of_the_engines_parts_reach_the_ring_and_outputs() -> None:
    async def scene(rig: Rig) -> None:
        rig.ring.finish_at = (1, FinishReason.REPETITION, "repetition_detected")
        rig.ring.kv_transfer_params = b'{"remote":[1]}'
        params = SamplingParams(
            logprob_token_ids=[9, 5],
            repetition_detection=RepetitionDetectionParams(max_pattern_size=4, min_count=2),
            extra_args={"key": 1, "kv_transfer_params": {"local": [2]}},
        )
        batch = rig.batch(["prompt"], params)
        await batch.run()
        [output] = batch.outputs
        assert output is not None and output.kv_transfer_params == {"remote": [1]}
        [choice] = output.outputs
        assert (choice.finish_reason, choice.stop_reason) == ("repetition", "repetition_detected")
        assert choice.logprobs is not None and choice.cumulative_logprob is not None
        for token, position in zip(choice.token_ids, choice.logprobs, strict=True):
            assert set(position) == {token, 9, 5}
            assert [(position[i].logprob, position[i].rank) for i in (9, 5)] == [(-9.0, None), (-5.0, None)]

    ring = FakeRing()
    play(ring, scene)
    [frame] = sent(ring, Generate)
    assert (frame.sampling.extra_args, frame.kv_transfer_params) == (b'{"key":1}', b'{"local":[2]}')
    assert frame.text.repetition == RepetitionDetection(4, 1, 2)


@settings(max_examples=25, deadline=None)
@given(most=st.integers(1, 40), num_prompts=st.integers(0, 120), num_tokens=st.integers(1, 3))
def test_a_short_queue_is_never_flooded(most: int, num_prompts: int, num_tokens: int) -> None:
    async def scene(rig: Rig) -> None:
        rig.now = 1.0  # stands still: after a while without news of the queue, one request is sent as a probe
        batch = rig.batch([f"p{i}" for i in range(num_prompts)], SamplingParams(max_tokens=num_tokens))
        await batch.run()
        assert batch.failures == {}
        assert [o.prompt for o in batch.outputs if o] == [f"p{i}" for i in range(num_prompts)]
        assert [len(o.outputs[0].token_ids) for o in batch.outputs if o] == [num_tokens] * num_prompts

    ring = ShortQueue(most)
    play(ring, scene)
    assert ring.most_seen <= most
    assert ring.num_refused <= max(0, 16 - most), "only before it had said how much room there is"


def test_refusals_caused_by_other_load_only_delay() -> None:
    """Another client takes the announced queue capacity."""

    async def scene(rig: Rig) -> None:
        turn = iter(range(10_000))

        def refuse(frame: Generate) -> Refused | None:
            return Refused(frame.request_id, frame.attempt, 429, "", "full", FULL) if next(turn) % 3 else None

        rig.ring.refuse = refuse
        batch = rig.batch(["a"] * 30, SamplingParams(max_tokens=2))
        await batch.run()
        assert batch.failures == {} and all(batch.outputs)

    play(FakeRing(), scene)


def test_a_prompt_that_fails_leaves_the_others_alone() -> None:
    async def scene(rig: Rig) -> None:
        rig.ring.refuse = lambda f: (
            Refused(f.request_id, f.attempt, 400, "prompt", "too odd", QueueCapacity(9, 999))
            if f.request_id == "b-1"
            else None
        )
        batch = rig.batch(["a", "b", "c"], SamplingParams(max_tokens=2))
        await batch.run()
        assert [o is None for o in batch.outputs] == [False, True, False]
        assert {i: str(e) for i, e in batch.failures.items()} == {1: "too odd"}

    play(FakeRing(), scene)


def test_a_failing_worker_fails_its_requests() -> None:
    async def scene(rig: Rig) -> None:
        rig.ring.fail_at = 1
        batch = rig.batch(["a", "b"], SamplingParams(max_tokens=3, n=2))
        await batch.run()
        error = GenerationError(batch.failures, batch.outputs)
        assert str(error) == "prompts[0]: the worker stumbled (1 more of 2 prompts failed)"
        assert isinstance(error, RuntimeError) and error.outputs == [None, None]

    play(FakeRing(), scene)


@pytest.mark.parametrize(
    ("prompts", "text"),
    [
        (["fine", "also rejected"], r"prompts\[1\]: the template raised"),
        (["fine", "x" * 257], r"prompts\[1\]: This model"),
        (["fine", [1] * 257], r"257 input tokens\. Please reduce the length of the prompts\[1\]"),
        (["x" * 256, "fine"], r"256 input tokens, and the output needs at least one.*prompts\[0\]"),
    ],
)
def test_a_prompt_that_cannot_be_served_stops_all_before_anything_runs(prompts: list[object], text: str) -> None:
    async def scene(rig: Rig) -> None:
        with pytest.raises(RequestError, match=text) as caught:
            await rig.batch(prompts, SamplingParams()).run()
        assert isinstance(caught.value, ValueError)
        assert sent(rig.ring, Generate) == []

    play(FakeRing(), scene)


def test_cancelling_cancels_running_and_waiting_requests() -> None:
    async def scene(rig: Rig) -> None:
        rig.ring.step_s = 0.01
        batch = rig.batch(["a"] * 20, SamplingParams(max_tokens=200))
        task = asyncio.create_task(batch.run())
        while batch.progress.num_output_tokens < 10:
            await asyncio.sleep(0.005)
        running = set(rig.ring.running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert {f.request_id for f in sent(rig.ring, Cancel)} == running
        await asyncio.sleep(0.05)
        assert rig.ring.running == {}

    rig = play(ShortQueue(4), scene)
    assert 4 <= len({f.request_id for f in sent(rig.ring, Generate)}) <= 16


def test_giving_up_while_texts_are_tokenized() -> None:
    async def scene(rig: Rig) -> None:
        rig.ring.silent = {Role.TOKENIZER_POOL}
        task = asyncio.create_task(rig.batch(["a"] * 9, SamplingParams()).run())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert rig.client.tokenizer_client.num_waiting == 0

    play(FakeRing(), scene)


def test_a_scheduler_that_stays_away_is_not_waited_for_for_ever() -> None:
    async def scene(rig: Rig) -> None:
        rig.now = 100.0
        rig.limiter.send_pending()
        rig.ring.lose(SCHEDULER)
        batch = rig.batch(["a", "b"], SamplingParams(max_tokens=2))
        task = asyncio.create_task(batch.run())
        await asyncio.sleep(0.05)
        assert not task.done()
        rig.now += PATIENCE_S + 1
        await task
        assert {i: str(e) for i, e in batch.failures.items()} == dict.fromkeys(
            (0, 1), "No scheduler is ready to serve the model `tiny` yet."
        )

    play(FakeRing(), scene)


def test_more_tokens_than_the_context_leaves_are_clamped() -> None:
    async def scene(rig: Rig) -> None:
        batch = rig.batch(["a" * 250, "b" * 255], SamplingParams(max_tokens=10**6))
        await batch.run()
        assert [len(o.outputs[0].token_ids) for o in batch.outputs if o] == [6, 1]

    play(FakeRing(), scene)


def test_a_restarted_scheduler_gets_the_open_requests() -> None:
    async def scene(rig: Rig) -> None:
        rig.ring.step_s = 0.005
        batch = rig.batch([f"p{i}" for i in range(10)], SamplingParams(max_tokens=12))
        task = asyncio.create_task(batch.run())
        while batch.progress.num_output_tokens < 20:
            await asyncio.sleep(0.002)
        rig.ring.running.clear()
        rig.ring.lose(SCHEDULER)
        await asyncio.sleep(0.03)
        rig.ring.join(member(Role.SCHEDULER, SCHEDULER + 100, card=CARD))
        await task
        text = "".join(f"w{i} " for i in range(12))
        assert [o.outputs[0].text for o in batch.outputs if o] == [text] * 10

    play(ShortQueue(6), scene)


def test_logprobs_have_the_fields_shape() -> None:
    async def scene(rig: Rig) -> None:
        params = SamplingParams(max_tokens=2, logprobs=3, prompt_logprobs=1)
        batch = rig.batch("abc", params)
        await batch.run()
        output = batch.outputs[0]
        assert output is not None and output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        # from the ring: rank 2 of the candidates 1, itself, 2
        assert list(output.prompt_logprobs[1] or ()) == [ord("b"), 1]
        choice = output.outputs[0]
        assert choice.logprobs is not None
        first = choice.logprobs[0]
        assert list(first) == [97, 1, 2]
        assert (first[97].logprob, first[97].rank, first[97].decoded_token) == (-1.5, 2, "a")
        assert (first[1].logprob, first[1].rank) == (-0.5, 1) and first[2].rank == 3
        assert choice.cumulative_logprob == -3.0

    play(FakeRing(), scene)


def test_without_detokenize_there_are_ids_alone() -> None:
    async def scene(rig: Rig) -> None:
        batch = rig.batch([[1, 2]], SamplingParams(max_tokens=3, detokenize=False))
        await batch.run()
        output = batch.outputs[0]
        assert output is not None and output.prompt is None
        assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [97, 98, 99])

    play(FakeRing(), scene)


def test_stop_strings_bad_words_salt_and_truncation_reach_the_ring() -> None:
    async def scene(rig: Rig) -> None:
        params = SamplingParams(max_tokens=9, stop="w2", bad_words=["no"], truncate_prompt_tokens=4)
        batch = rig.batch({"prompt": "long prompt", "cache_salt": "s"}, params)
        await batch.run()
        output = batch.outputs[0]
        assert output is not None and output.prompt == "long prompt"
        assert bytes(output.prompt_token_ids) == b"ompt"
        choice = output.outputs[0]
        assert (choice.text, choice.finish_reason, choice.stop_reason) == ("w0 w1 ", "stop", "w2")
        first, second = sent(rig.ring, Tokenize)
        assert (first.cache_salt, second.cache_salt, second.text) == ("s", "s", None)
        frame = sent(rig.ring, Generate)[0]
        assert frame.sampling.bad_words == [[ord("n"), ord("o")]] and frame.cache_salt == "s"

    play(FakeRing(), scene)


def test_priorities_and_beams_reach_the_ring() -> None:
    async def scene(rig: Rig) -> None:
        params = SamplingParams(n=2, use_beam_search=True, temperature=0, max_tokens=2)
        params = [read(params, CARD.vocab_size, 20), read(SamplingParams(), CARD.vocab_size, 20)]
        requests = [
            OfflineRequest(p, a, 1, i)
            for p, a, i in zip(read_prompts(["a", "b"], "tiny"), params, [-3, 5], strict=True)
        ]
        await RequestBatch("b", requests, CARD, rig.client, rig.limiter).run()
        found = {f.request_id: (f.priority, f.beam.width if f.beam else 0) for f in sent(rig.ring, Generate)}
        assert found == {"b-0": (-3, 2), "b-1": (5, 0)}

    play(FakeRing(), scene)


def test_seeds_are_given_or_derived() -> None:
    async def scene(rig: Rig) -> None:
        batch = rig.batch(["a", "a", "a"], SamplingParams(), SamplingParams(seed=-2), SamplingParams(seed=5))
        await batch.run()
        seeds = {f.request_id: f.sampling.seed for f in sent(rig.ring, Generate)}
        assert seeds == {"b-0": derived_seed(0, 0), "b-1": 2**64 - 2, "b-2": 5}

    play(FakeRing(), scene)
    many = {derived_seed(seed, number) for seed in range(20) for number in range(50)}
    assert len(many) == 1000 and max(many) > 2**63 > min(many)

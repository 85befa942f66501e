"""Which size a step with prefill is padded to, and which is captured next, with assumed times of two models."""

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from blockyard.services.gpu_worker.execution.cuda.prefill_sizes import (
    LAUNCH_MARGIN,
    MOST_BYTES,
    GraphCost,
    PrefillGraphSizes,
    covers,
    descriptors,
)
from blockyard.services.gpu_worker.execution.cuda.prefill_steps import BatchDescriptor
from blockyard.shared.config.services.worker import capture_sizes

LAUNCH_S = 0.015


@dataclass(frozen=True)
class Model:
    """Device time of a step, in seconds: the least, and the time of each token."""

    least_s: float
    token_s: float

    def device_s(self, tokens: int) -> float:
        return max(self.least_s, self.token_s * tokens)


SMALL, LARGE = Model(0.001, 1.6e-6), Model(0.0065, 22e-6)
MIXTURE = Model(0.9 * LAUNCH_S, 0.9 * LAUNCH_S / 2048)  # few tokens read all experts, too


def fits(capacity: int = 256) -> "dict[int, int]":
    return {n: next(m for m in capture_sizes(capacity) if m >= n) for n in range(capacity + 1)}


def sizes_of(capacity: int = 256, most_tokens: int = 2048) -> PrefillGraphSizes:
    return PrefillGraphSizes(capacity, most_tokens, fits(capacity).__getitem__)


def capture(sizes: PrefillGraphSizes, model: Model, descriptor: BatchDescriptor) -> None:
    sizes.add_captured(descriptor, GraphCost(LAUNCH_S, model.device_s(descriptor.num_tokens), 0, 1000))


def captured(model: Model, most: int = 1000) -> tuple[PrefillGraphSizes, list[BatchDescriptor]]:
    """Captures up to `most` sizes, as the worker does when idle."""
    sizes, done = sizes_of(), []
    while len(done) < most and (descriptor := sizes.next()) is not None:
        done.append(descriptor)
        capture(sizes, model, descriptor)
    return sizes, done


def step(decodes: int, fresh: int, prefills: int = 1) -> BatchDescriptor:
    return BatchDescriptor(decodes, fresh, prefills, fits()[decodes + prefills])


def test_three_sizes_hold_every_step_of_a_small_model() -> None:
    sizes, done = captured(SMALL, most=3)
    assert [(one.num_decodes, one.num_prefill_tokens) for one in done] == [(0, 512), (0, 2048), (256, 2048)]
    for decodes, fresh, prefills in ((0, 2048, 20), (3, 2045, 4), (250, 1798, 6), (100, 600, 60)):
        assert sizes.pick(step(decodes, fresh, prefills)) == done[2]
    assert sizes.pick(step(0, 2048, 8)) == done[1]
    assert sizes.pick(step(0, 500, 8)) == done[0]
    assert sizes.pick(step(0, 500, 9)) == done[2], "more prompts than they have room for"
    assert sizes.pick(step(100, 1900, 65)) is None, "more prompts than any has room for"


def test_sizes_that_keep_the_device_much_longer_than_the_host_are_left_out() -> None:
    sizes, done = captured(LARGE)
    assert sizes.captured == 1.0
    assert all(one.num_tokens * LARGE.token_s < LAUNCH_MARGIN * LAUNCH_S for one in (done[0], *done[2:]))
    assert done[1].num_tokens == 2048 and sizes.pick(step(0, 2048)) is None, "it is measured, and not used"
    assert len(done) > 15
    assert len(captured(SMALL)[1]) == len(descriptors(256, 2048, fits().__getitem__))


def test_a_large_size_of_a_mixture_is_captured_though_a_small_one_takes_as_long() -> None:
    sizes, done = captured(MIXTURE)
    assert sizes.pick(step(0, 2048)) == done[1]
    assert len(done) > 15


def test_a_step_is_padded_only_where_the_host_would_be_slower() -> None:
    sizes, _ = captured(LARGE)
    assert sizes.pick(step(0, 2048)) is None
    assert sizes.pick(step(0, 300)) == BatchDescriptor(0, 384, 9, 8)
    assert sizes.pick(step(10, 300)) == BatchDescriptor(16, 384, 13, 32)
    slow = sizes_of()
    for descriptor in (BatchDescriptor(0, 512, 9, 8), BatchDescriptor(0, 768, 9, 8)):
        capture(slow, LARGE, descriptor)
    assert slow.pick(step(0, 500)) == BatchDescriptor(0, 512, 9, 8)
    assert slow.pick(step(0, 760)) is None, "the device would be busy for longer"


def test_the_size_that_steps_missed_is_captured_next() -> None:
    sizes, _ = captured(SMALL, most=3)
    some = step(200, 100)
    assert sizes.pick(some) == BatchDescriptor(256, 2048, 65, 256), "with much padding"
    usual = sizes.next()
    sizes.on_step(some)
    due = sizes.next()
    assert due == BatchDescriptor(256, 128, 9, 256) != usual
    capture(sizes, SMALL, due)
    assert sizes.pick(some) == due and sizes.next() == usual
    sizes.on_step(some)
    assert sizes.next() == usual, "none is missing"


def test_the_first_sizes_predict_the_others() -> None:
    """They are captured first whatever steps have missed."""
    sizes, _ = captured(SMALL, most=1)
    usual = sizes.next()
    sizes.on_step(step(40, 2000, 5))
    assert sizes.next() == usual


def test_a_size_that_keeps_hidden_rows_is_captured_only_if_steps_missed_it() -> None:
    sizes, done = captured(SMALL)
    assert sizes.captured == 1.0 and not any(one.keeps_hidden for one in done)
    sizes.on_step(replace(step(0, 500), keeps_hidden=True))
    due = sizes.next()
    assert due is not None and due.keeps_hidden and sizes.captured < 1.0
    capture(sizes, SMALL, due)
    assert sizes.captured == 1.0 and sizes.next() is None


def test_steps_that_keep_the_device_busy_miss_no_size() -> None:
    sizes, _ = captured(LARGE, most=1)
    usual = sizes.next()
    for _ in range(100):
        sizes.on_step(step(100, 1948, 4))
    assert sizes.next() == usual


def test_a_size_without_enough_memory_is_left_out() -> None:
    sizes = sizes_of()
    first = sizes.next()
    assert first is not None
    sizes.add_captured(first, GraphCost(LAUNCH_S, 0.001, 0, MOST_BYTES // 2))
    assert max(one.num_tokens for one in sizes.missing) <= 2 * first.num_tokens
    second = sizes.next()
    assert second is not None
    sizes.add_captured(second, GraphCost(LAUNCH_S, 0.001, MOST_BYTES, 1000))
    largest = max(first.num_tokens, second.num_tokens)
    assert 0 < max(one.num_tokens for one in sizes.missing) < largest, "smaller ones find room in its memory"


def test_logits_of_a_small_size_say_nothing_of_the_memory_of_a_large_one() -> None:
    sizes = sizes_of()
    for tokens in (512, 2048):
        capture(sizes, SMALL, next(one for one in sizes.missing if one.num_tokens == tokens))
    rows = next(one for one in sizes.missing if one.num_decodes == 256 and one.num_prefill_tokens == 32)
    sizes.add_captured(rows, GraphCost(LAUNCH_S, 0.001, 0, MOST_BYTES // 4))
    assert max(one.num_tokens for one in sizes.missing) == 2048 + 256


def test_a_size_that_keeps_the_device_as_long_as_the_host_is_used() -> None:
    sizes = sizes_of()
    for tokens in (512, 2048):
        sizes.add_captured(BatchDescriptor(0, tokens, 9, 8), GraphCost(LAUNCH_S, 1.2 * LAUNCH_S, 0, 1000))
    assert sizes.pick(step(0, 2048)) == BatchDescriptor(0, 2048, 9, 8), "a busy host would launch more slowly"


def test_a_size_that_would_take_more_memory_is_captured_only_where_the_host_is_slower() -> None:
    """Those behind it would find less."""
    _, done = captured(Model(0.0, 1.3 * LAUNCH_S / 2048))
    assert max(one.num_tokens for one in done) == 2048
    assert any(one.num_decodes and one.num_tokens > 1600 for one in done)


def test_layouts() -> None:
    few = descriptors(1, 100, fits().__getitem__)
    assert [(one.num_decodes, one.num_prefill_tokens) for one in few] == [(0, 100), (0, 64), (0, 32), (0, 96)]
    some = descriptors(20, 2048, fits(20).__getitem__)
    assert len(set(some)) == len(some)
    assert {one.num_decodes for one in some} == {0, 16, 20}
    assert all(one.num_seqs <= 20 and one.num_prefill_tokens <= 2048 for one in some)


@given(
    st.sampled_from([SMALL, LARGE]),
    st.lists(st.tuples(st.integers(0, 255), st.integers(2, 2048), st.integers(1, 80)), min_size=1, max_size=60),
)
def test_any_steps(model: Model, steps: list[tuple[int, int, int]]) -> None:
    """A picked size holds the step and is faster, as does the one that is captured for it."""
    sizes, _ = captured(model, most=2)
    for decodes, fresh, prefills in steps:
        some = step(decodes, fresh, min(prefills, fresh // 2, 256 - decodes))
        before = sizes.next()
        num_missing = len(sizes.missing)
        sizes.on_step(some)
        due = sizes.next()
        assert due == before or (due is not None and covers(due, some))
        if due is not None and covers(due, some):
            capture(sizes, model, due)
            assert len(sizes.missing) == num_missing - 1
        picked = sizes.pick(some)
        if picked is not None:
            assert covers(picked, some)
            assert model.device_s(picked.num_tokens) <= max(LAUNCH_S, 1.2 * model.device_s(some.num_tokens))

"""Which requests are admitted, which wait, and which are refused with which reason."""

import pytest

from blockyard.shared.messages import Accepted, ChoiceState, FinishReason, Generate, QueueCapacityChanged, Refused

from ..conftest import Ring
from ..harness.world import World


@pytest.mark.parametrize(
    ("shape", "num_prompt", "says"),
    [
        ({"max_model_len": 20}, 20, "the prompt's 20 tokens need a context of 21, this model has 20"),
        ({"num_blocks": 3, "block_size": 4}, 12, "the prompt's 12 tokens need 4 KV blocks of 4 tokens, there are 3"),
    ],
)
def test_a_request_that_can_never_fit_is_refused_with_the_number_it_needs(
    ring: type[Ring], shape: dict[str, int], num_prompt: int, says: str
) -> None:
    it = ring(**shape)
    it.submit("a", num_prompt)
    refused = it.journal("a").refused
    assert refused is not None
    assert (refused.status, refused.field) == (400, "prompt")
    assert refused.message.startswith(says)
    it.submit("b", num_prompt - 1, max_tokens=5)
    it.submit("scored", num_prompt, max_tokens=0)  # no token is sampled: it just fits
    it.finish()
    assert len(it.output("b").ids) == 1


@pytest.mark.parametrize(
    ("change", "status", "field"),
    [
        ({"model": "other"}, 404, "model"),
        ({"prompt_ids": b""}, 400, "prompt"),
        ({"prompt_ids": b"abc"}, 400, "prompt"),
        ({"choices": []}, 400, "n"),
        ({"choices": [ChoiceState(0, output_ids=b"abcdefg")]}, 400, "choices"),
    ],
)
def test_invalid_requests_are_refused(ring: type[Ring], change: dict[str, object], status: int, field: str) -> None:
    it = ring()
    good = it.gateway.new("a", [1, 2], it.world.sampling(max_tokens=1), 1)
    bad = Generate(**{name: getattr(good, name) for name in good.__struct_fields__} | change)
    it.world.tell(it.gateway.incarnation, bad)
    refused = it.journal("a").refused
    assert refused is not None
    assert (refused.status, refused.field) == (status, field)
    it.finish()


def test_the_queue_is_bounded_in_choices(ring: type[Ring]) -> None:
    """Choices parked until the prompt is computed count too: one of the six runs, five wait."""
    it = ring(max_queue_len=5, max_num_seqs=1)
    for i in range(4):
        it.submit(f"{i}", 5, n=2 + 2 * (i == 1))
    assert [it.journal(f"{i}").refused is None for i in range(4)] == [True, True, False, False]
    refused = it.journal("3").refused
    assert refused is not None
    assert (refused.status, refused.capacity.choices) == (429, 0)
    assert isinstance(it.gateway.capacities[-1], QueueCapacityChanged)
    assert it.gateway.capacities[-1].capacity.choices == 0
    it.finish()
    assert [frame.capacity.choices > 0 for frame in it.gateway.capacities] == [False, True]


def test_a_queue_full_for_a_moment_is_reported_again(ring: type[Ring]) -> None:
    """The last of the requests that arrive together is refused; the next step schedules all others."""
    it = ring(max_queue_len=3, max_num_seqs=8)
    gateway, sampling = it.gateway, it.world.sampling(max_tokens=2)
    for name in "abcd":
        frame = gateway.new(name, [1, 2], sampling, 1)
        it.world.core.on_message(gateway.incarnation, frame, it.world.now)
    it.world.turn()
    it.finish()
    assert it.journal("d").refused is not None
    assert [frame.capacity.choices for frame in gateway.capacities] == [3]


def test_the_queue_is_bounded_in_tokens_but_takes_one_long_prompt(ring: type[Ring]) -> None:
    it = ring(max_queue_tokens=30, max_num_seqs=1)
    it.submit("running", 5)
    it.submit("long", 40)
    it.submit("short", 5)
    assert it.journal("long").refused is None
    assert it.journal("short").refused is not None
    it.finish()


def test_a_resubmitted_request_is_not_refused_by_a_full_queue(ring: type[Ring]) -> None:
    it = ring(max_queue_len=1, max_num_seqs=1)
    it.submit("running", 5)
    it.submit("waiting", 5)
    it.gateway.new("again", [1, 2, 3], it.world.sampling(max_tokens=3), 1)
    it.world.tell(it.gateway.incarnation, it.gateway.again("again"))
    it.finish()
    assert it.output("again").finish is FinishReason.LENGTH


def test_without_a_detokenizer_requests_wait_and_are_accepted_later(ring: type[Ring]) -> None:
    it = ring()
    it.world.kill(it.detokenizer.incarnation)
    it.submit("a", 5)
    it.world.settle()
    assert it.journal("a").detokenizer is None
    assert it.world.core.stats().waiting == 1
    detokenizer = it.world.add_detokenizer()
    assert it.journal("a").detokenizer == detokenizer.incarnation
    it.finish()


def test_streams_go_to_the_detokenizer_with_the_fewest(ring: type[Ring]) -> None:
    it = ring(max_num_batched_tokens=64, max_num_seqs=8)
    other = it.world.add_detokenizer()
    it.submit("a", 5, n=3)
    it.submit("b", 5)
    it.submit("c", 5)
    it.steps(2)
    homes = [it.journal(r).detokenizer for r in "abc"]
    assert homes == [it.detokenizer.incarnation, other.incarnation, other.incarnation]
    it.finish()


def test_a_request_from_before_the_first_attach_fails_if_it_does_not_fit(ring: type[Ring]) -> None:
    world = World(ring().world.shape)
    gateway = world.add_gateway()
    world.add_detokenizer()
    world.submit(gateway, "a", 500)
    world.add_worker()
    world.settle()
    out = gateway.journals["a"].outputs[0]
    assert out.finish is FinishReason.FAILED
    assert "500 tokens" in out.detail
    world.check_idle()


def test_accepted_has_the_free_capacity(ring: type[Ring]) -> None:
    """A request that starts does not wait any more, so that a queue for one is not full behind it."""
    it = ring(max_queue_len=5)
    it.submit("a", 7)
    answers = [o.frame for o in it.world.sent if isinstance(o.frame, Accepted | Refused)]
    assert [(a.request_id, a.capacity.choices, a.capacity.tokens) for a in answers] == [("a", 5, 10_000)]

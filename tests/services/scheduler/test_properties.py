"""Whatever happens, in whatever order: nothing is lost, leaked, repeated or owned twice, and everything ends."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blockyard.services.scheduler.prefill_shares import PrefillShares

from .program import BYTES_PER_STEP, Program
from .world import Shape

STEPS = 420  # of one history
HISTORIES = 150

shapes = st.builds(
    Shape,
    depth=st.integers(0, 3),
    num_blocks=st.integers(6, 30),
    block_size=st.integers(1, 5),
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.integers(1, 24),
    max_model_len=st.integers(16, 60),
    eos_every=st.sampled_from([0, 6]),
    max_queue_len=st.sampled_from([3, 100]),
    max_queue_tokens=st.sampled_from([60, 10_000]),
    max_queue_delay_s=st.sampled_from([None, 1.0]),
    prefills=st.sampled_from(
        [PrefillShares(), PrefillShares(max_partial=2, long_tokens=5), PrefillShares(max_partial=3, max_long=2)]
    ),
    delay_factor=st.sampled_from([0.0, 0.5]),
    whole_prompts=st.booleans(),
    stutters=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    prefix_caching=st.sampled_from([True, True, True, False]),
    num_host_blocks=st.sampled_from([0, 1, 5, 40]),
    failing=st.booleans(),
)


@settings(max_examples=HISTORIES, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(shapes, st.binary(min_size=STEPS * BYTES_PER_STEP, max_size=STEPS * BYTES_PER_STEP))
def test_any_history(shape: Shape, data: bytes) -> None:
    Program(shape).run(data)

"""In random histories nothing is lost, leaked, repeated or owned twice, and every request ends."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from .harness.program import BYTES_PER_STEP, SHAPES, Program
from .harness.world import Shape

EVENTS = 420  # steps of one history
HISTORIES = 1000 if settings.get_current_profile_name() == "long" else 75
LEAST = 100_000 * HISTORIES // 400  # steps of the scheduler in all histories; the invariants are checked after each

shapes = st.builds(Shape, **{name: st.sampled_from(values) for name, values in SHAPES.items()})
counted: Counter[str] = Counter()


@pytest.mark.timeout(20 * HISTORIES)  # 0.2 s a history on an idle core
@settings(
    max_examples=HISTORIES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
@given(shapes, st.binary(min_size=EVENTS * BYTES_PER_STEP, max_size=EVENTS * BYTES_PER_STEP))
def test_random_histories_keep_the_invariants(shape: Shape, data: bytes) -> None:
    program = Program(shape)
    try:
        program.run(data)
    finally:
        counted["steps"] += program.world.num_turns
        counted["plans"] += program.world.num_steps
        counted["waiting"] += program.world.num_waiting_rows
        counted["rows"] += sum(detokenizer.num_rows for detokenizer in program.world.detokenizers.values())


def test_the_histories_ran_many_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """Runs after the test above, which may have been deselected."""
    if not counted:
        pytest.skip("the histories were not run")
    with capsys.disabled():
        text = (
            "{steps} steps of the scheduler, {plans} plans answered, {rows} tokens of decode batches,"
            " {waiting} rows of them waited"
        )
        print("\n" + text.format(**counted), end="")
    assert counted["steps"] >= LEAST
    assert counted["rows"] > counted["plans"] / 20
    assert counted["waiting"] > counted["plans"] / 200

"""Pipeline stages compute steps of different sequences at a time, as on GPUs: real processes, times of their steps."""

from pathlib import Path

import pytest
import timed_stages
from tiny_models import BY_NAME, start


@pytest.mark.parametrize("num_stages", [2, 3])
def test_an_earlier_stage_begins_a_step_before_the_last_one_has_ended_that_before(
    num_stages: int, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    BY_NAME["llama"].save(folder)
    alone = start(folder, max_num_seqs=timed_stages.CAPACITY)
    want = timed_stages.run_plans(alone, 1, num_stages)
    records = timed_stages.run(num_stages, tmp_path / "group", folder, alone.geometry)
    first, last = records[0], records[-1]
    assert last.tokens == want and {len(one) for one in want.values()} == {timed_stages.NUM_ROUNDS + 1}
    num_decodes = timed_stages.NUM_ROUNDS * num_stages
    assert [len(one.ends) for one in records] == [num_decodes + 1] * num_stages  # the prompts, too
    overlapping = [first.begins[step + 1] < last.ends[step] for step in range(1, num_decodes)]
    assert sum(overlapping) > 0.7 * len(overlapping)  # a busy machine may hold a process up
    for step in range(1, num_decodes - num_stages):
        assert first.begins[step + num_stages] > last.ends[step], "a step began without its tokens"

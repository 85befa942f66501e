"""Results of a step for the scheduler: plain tokens as bytes in the plan's order, other results as SlotResult."""

import numpy as np

from blockyard.services.gpu_worker.execution.decode_tokens import DecodeTokens
from blockyard.services.gpu_worker.interfaces import CompletedPlan
from blockyard.services.gpu_worker.service import packed
from blockyard.shared.messages import (
    NO_TOKEN,
    FinishReason,
    SlotResult,
    SlotRun,
    StepPlan,
    TokenLogprobs,
    decode_logprobs,
)
from blockyard.shared.token_ids import unpack


def plan_of(*runs: tuple[int, int]) -> StepPlan:
    return StepPlan(1, 1, [], [], [], [SlotRun(slot, count) for slot, count in runs])


def done(plan: StepPlan, results: list[SlotResult], rows: DecodeTokens | None = None) -> CompletedPlan:
    return CompletedPlan(plan, results, 0.0, 0.0, [], decode_outputs=rows)


def test_plain_tokens_are_in_the_order_of_the_runs() -> None:
    plan = plan_of((4, 1), (2, 1), (9, 1))
    results = [SlotResult(9, [90], 5), SlotResult(4, [40], 7), SlotResult(2, [20], 3)]
    assert packed(done(plan, results)) == ([], b"".join(t.to_bytes(4, "little") for t in (40, 20, 90)), [])


def test_a_slot_with_more_than_a_plain_token_has_a_result() -> None:
    scores = [TokenLogprobs(1, -0.5, 1, [], [])]
    more = [
        SlotResult(1, [10], 5, FinishReason.LENGTH),
        SlotResult(2, [10, 11], 5),
        SlotResult(3, [], 5),
        SlotResult(4, [10], 5, FinishReason.STOP, logprobs=scores),
        SlotResult(5, [10], 5, prompt_logprobs=scores),
        SlotResult(6, [], 0, FinishReason.FAILED, detail="why"),
        SlotResult(7, [10], 12),  # several prompt tokens were computed
    ]
    plan = plan_of(*((slot, 1) for slot in range(7)), (7, 12), (8, 1))
    slots, token_ids, logprobs = packed(done(plan, [SlotResult(0, [99], 2), *more]))
    assert slots == more and not logprobs
    assert unpack(token_ids) == [99, *[NO_TOKEN] * 8], "slot 8 was silent"


def test_without_plain_tokens_there_are_none() -> None:
    results = [SlotResult(0, [5], 9, FinishReason.STOP)]
    assert packed(done(plan_of((0, 1)), results)) == (results, b"", [])
    assert packed(done(plan_of((0, 1)), [])) == ([], b"", [])


def test_log_probabilities_of_a_token_are_in_the_order_of_the_runs() -> None:
    scores = TokenLogprobs(10, -0.5, 1, [10, 3], [-0.5, -1.5])
    results = [SlotResult(2, [10], 5, logprobs=[scores]), SlotResult(4, [40], 7)]
    slots, token_ids, logprobs = packed(done(plan_of((4, 1), (2, 1), (9, 1)), results))
    assert (slots, unpack(token_ids)) == ([], [40, 10, NO_TOKEN])
    assert [decode_logprobs(one) for one in logprobs] == [None, scores, None]


def test_rows_are_packed_like_results() -> None:
    plan = plan_of((4, 1), (2, 1), (9, 1), (0, 7), (6, 1))
    rows = DecodeTokens(np.array([9, 2]), np.array([90, 20], np.int32), np.array([5, 3]))
    more = [SlotResult(0, [1], 7), SlotResult(6, [60], 8)]
    told = done(plan, more, rows)
    assert packed(told) == packed(done(plan, [*more, SlotResult(2, [20], 3), SlotResult(9, [90], 5)]))
    assert unpack(packed(told)[1]) == [NO_TOKEN, 20, 90, NO_TOKEN, 60]
    assert {result.slot: result.token_ids for result in told.all_results} == {0: [1], 6: [60], 9: [90], 2: [20]}

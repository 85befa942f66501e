"""What the scheduler is told of a step: plain tokens as bytes in the plan's order, the rest in words."""

from blockyard.services.gpu_worker.answers import packed
from blockyard.shared.messages import NO_TOKEN, FinishReason, SlotResult, SlotRun, StepPlan, TokenLogprobs
from blockyard.shared.token_ids import unpack


def plan_of(*runs: tuple[int, int]) -> StepPlan:
    return StepPlan(1, 1, [], [], [], [SlotRun(slot, count) for slot, count in runs])


def test_plain_tokens_stand_in_the_order_of_the_runs() -> None:
    plan = plan_of((4, 1), (2, 1), (9, 1))
    results = [SlotResult(9, [90], 5), SlotResult(4, [40], 7), SlotResult(2, [20], 3)]
    assert packed(plan, results) == ([], b"".join(t.to_bytes(4, "little") for t in (40, 20, 90)))


def test_whoever_has_more_to_say_says_it() -> None:
    scores = [TokenLogprobs(1, -0.5, 1, [], [])]
    more = [
        SlotResult(1, [10], 5, FinishReason.LENGTH),
        SlotResult(2, [10, 11], 5),
        SlotResult(3, [], 5),
        SlotResult(4, [10], 5, logprobs=scores),
        SlotResult(5, [10], 5, prompt_logprobs=scores),
        SlotResult(6, [], 0, FinishReason.FAILED, detail="why"),
        SlotResult(7, [10], 12),  # a prompt of which more than a token was computed
    ]
    plan = plan_of(*((slot, 1) for slot in range(7)), (7, 12), (8, 1))
    slots, token_ids = packed(plan, [SlotResult(0, [99], 2), *more])
    assert slots == more
    assert unpack(token_ids) == [99, *[NO_TOKEN] * 8], "slot 8 was silent"


def test_where_nobody_says_just_a_token_there_are_none() -> None:
    results = [SlotResult(0, [5], 9, FinishReason.STOP)]
    assert packed(plan_of((0, 1)), results) == (results, b"")
    assert packed(plan_of((0, 1)), []) == ([], b"")

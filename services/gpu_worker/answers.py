"""What a step's slots produced, as the scheduler is told."""

from array import array
from collections.abc import Sequence

from blockyard.shared.messages import NO_TOKEN, SlotResult, StepPlan


def packed(plan: StepPlan, results: Sequence[SlotResult]) -> tuple[list[SlotResult], bytes]:
    """The results of slots that have more to say than one token, and the tokens of the others, by the plan's runs."""
    token_ids = array("I", [NO_TOKEN]) * len(plan.runs)
    places = {run.slot: i for i, run in enumerate(plan.runs) if run.max_tokens == 1}
    others: list[SlotResult] = []
    for result in results:
        place = places.get(result.slot)
        if place is None or not is_plain(result):
            others.append(result)
        else:
            token_ids[place] = result.token_ids[0]
    return others, token_ids.tobytes() if len(others) < len(results) else b""


def is_plain(result: SlotResult) -> bool:
    """It says one token and nothing else."""
    return (
        len(result.token_ids) == 1
        and result.finish is None
        and not result.logprobs
        and not result.prompt_logprobs
        and not result.detail
    )

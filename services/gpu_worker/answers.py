"""The results of a step in the form of StepResult."""

from array import array

from blockyard.services.gpu_worker.interfaces import CompletedPlan
from blockyard.shared.messages import NO_TOKEN, SlotResult


def packed(done: CompletedPlan) -> tuple[list[SlotResult], bytes]:
    """Results of slots that need more than one token id, and the token ids of all other slots, one for each run."""
    runs, rows = done.plan.runs, done.decode_outputs
    token_ids = array("I", rows.token_ids_by_run(runs)) if rows else array("I", [NO_TOKEN]) * len(runs)
    if not done.slot_results:
        return [], token_ids.tobytes() if rows else b""
    places = {run.slot: i for i, run in enumerate(runs) if run.max_tokens == 1}
    others: list[SlotResult] = []
    for result in done.slot_results:
        place = places.get(result.slot)
        if place is None or not _is_plain(result):
            others.append(result)
        else:
            token_ids[place] = result.token_ids[0]
    return others, token_ids.tobytes() if rows or len(others) < len(done.slot_results) else b""


def _is_plain(result: SlotResult) -> bool:
    """Whether a result is one token and nothing else."""
    return (
        len(result.token_ids) == 1
        and result.finish is None
        and not result.logprobs
        and not result.prompt_logprobs
        and not result.detail
    )

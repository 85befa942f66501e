"""What a StepResult means for the choices that ran."""

from blockyard.services.scheduler.groups import PlanRecord
from blockyard.services.scheduler.lifecycle import Lifecycle
from blockyard.services.scheduler.requests import Choice, Phase, Seat
from blockyard.services.scheduler.waiting import WaitingQueue
from blockyard.shared.messages import FinishReason, SlotResult, StepResult, TokenStep


class Results:
    """Turns results into TokenSteps and ends what the worker ended. Counts what it saw."""

    def __init__(self, waiting: WaitingQueue, lifecycle: Lifecycle) -> None:
        self.num_output_tokens = 0
        self.num_prompt_tokens = 0  # of prompts and of what was computed again
        self._waiting, self._lifecycle = waiting, lifecycle

    def apply(self, record: PlanRecord, result: StepResult) -> None:
        """Slots that did not run in the plan are ignored; those that did and are silent produced nothing."""
        seats, chunks, stamp_s = record.seats, record.chunks, result.stamp_s
        for slot in result.slots:
            seat = seats.pop(slot.slot, None)
            if seat is None or seat.choice.phase is Phase.ENDED:
                continue
            choice = seat.choice
            self._count(seat, slot.num_computed, chunks.get(slot.slot, 1))
            num_tokens = len(slot.token_ids)
            finish = slot.finish
            if num_tokens:
                if finish is None and choice.known + num_tokens >= seat.limit:
                    finish = FinishReason.LENGTH  # where the worker's own limit is farther than ours
                self.num_output_tokens += num_tokens
            elif finish is None and not slot.prompt_logprobs:
                continue
            request = choice.request
            sink = request.sink
            if sink is not None:
                sink.stamp(stamp_s)
                sink.steps.append(
                    TokenStep(
                        request.id,
                        request.attempt,
                        choice.index,
                        len(choice.outputs),
                        slot.token_ids,
                        finish,
                        slot.stop_token,
                        slot.detail,
                        slot.logprobs,
                        slot.first_prompt,
                        slot.prompt_logprobs,
                    )
                )
            if choice.ticket:
                self._waiting.grow(choice, num_tokens)
            choice.known += num_tokens
            if finish is not None:
                self._lifecycle.end(choice)
            else:
                _remember(choice, slot)
        for number, seat in seats.items():
            if seat.choice.phase is not Phase.ENDED:
                self._count(seat, seat.computed, chunks.get(number, 1))

    def _count(self, seat: Seat, num_computed: int, granted: int) -> None:
        """A step may compute less than granted: the rest is to be granted again."""
        done = num_computed - seat.computed
        if done != granted:
            seat.granted -= granted - done
        if seat.computed < seat.prefill_end:
            self.num_prompt_tokens += done
        seat.computed = num_computed


def _remember(choice: Choice, slot: SlotResult) -> None:
    choice.outputs.extend(slot.token_ids)
    if slot.logprobs:
        choice.logprobs.extend(slot.logprobs)
    if slot.prompt_logprobs:
        if not choice.prompt_logprobs:
            choice.prompt_first = slot.first_prompt
        choice.prompt_logprobs.extend(slot.prompt_logprobs)

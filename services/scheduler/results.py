"""What a StepResult means for the choices that ran."""

from blockyard.services.scheduler.beams import Beams
from blockyard.services.scheduler.groups import Group, PlanRecord
from blockyard.services.scheduler.lifecycle import Lifecycle
from blockyard.services.scheduler.prefix import PrefixCache
from blockyard.services.scheduler.requests import Choice, Phase, Seat
from blockyard.services.scheduler.spoilt import spoilt, unfetched
from blockyard.services.scheduler.waiting import WaitingQueue
from blockyard.shared.messages import FinishReason, SlotResult, StepResult, TokenStep


class Results:
    """Turns results into TokenSteps and ends what the worker ended. Counts what it saw."""

    def __init__(self, waiting: WaitingQueue, lifecycle: Lifecycle, prefix: PrefixCache, beams: Beams) -> None:
        self.num_output_tokens = 0
        self.num_prompt_tokens = 0  # of prompts and of what was computed again
        self._waiting, self._lifecycle, self._prefix, self._beams = waiting, lifecycle, prefix, beams

    def apply(self, group: Group, record: PlanRecord, result: StepResult) -> None:
        """Slots that did not run in the plan are ignored; those that did and are silent produced nothing."""
        if result.failed_fetches:
            self._unfetched(group, record, result.failed_fetches)
        seats, chunks, take = record.seats, record.chunks, self._take
        for slot in result.slots:
            seat = seats.pop(slot.slot, None)
            if seat is None or self._decoded(group, seat, slot, result.stamp_s):
                continue
            if slot.finish is not None and slot.finish is FinishReason.FAILED:
                self._spoil(group, seat)
            if seat.choice.phase is not Phase.ENDED:
                take(group, seat, slot, chunks.get(slot.slot, 1), result.stamp_s)
        for number, seat in seats.items():
            seat.granted -= chunks.get(number, 1)

    def _decoded(self, group: Group, seat: Seat, slot: SlotResult, stamp_s: float) -> bool:
        """What nearly every slot did in nearly every step, one token and nothing else, by a shorter way.

        False if it was something else.
        """
        computed, known, choice = seat.computed, seat.choice.known, seat.choice
        request, token_ids, num_computed = choice.request, slot.token_ids, slot.num_computed
        sink = request.sink
        if (
            num_computed != computed + 1
            or computed < seat.prefill_end  # a token of the prompt was computed
            or slot.finish is not None
            or known + 1 >= seat.limit
            or len(token_ids) != 1
            or slot.logprobs
            or choice.phase is not Phase.RUNNING
            or choice.seat is not seat
            or sink is None
        ):
            return False
        seat.computed = num_computed
        if num_computed >= seat.name_at:
            self._prefix.due(group, seat)
        self.num_output_tokens += 1
        if request.payer is not None:
            request.payer.charge(1)
        if not sink.stamp_s:
            sink.stamp_s = stamp_s
        first = known - request.num_prompt
        sink.steps.append(TokenStep(request.id, request.attempt, choice.index, first, token_ids))
        choice.known = known + 1
        choice.outputs.append(token_ids[0])
        return True

    def _take(self, group: Group, seat: Seat, slot: SlotResult, granted: int, stamp_s: float) -> None:
        """What a slot produced goes to its text, and to what is known of its choice.

        A step may compute less than granted: the rest is to be granted again.
        """
        choice, finish, num_tokens = seat.choice, slot.finish, len(slot.token_ids)
        num_computed = slot.num_computed
        done = num_computed - seat.computed
        if done != granted:
            seat.granted -= granted - done
        if seat.computed < seat.prefill_end:
            self.num_prompt_tokens += max(0, done)
        seat.computed = num_computed
        if num_computed >= seat.name_at:
            self._prefix.due(group, seat)
        if num_tokens:
            if finish is None and choice.known + num_tokens >= seat.limit:
                finish = FinishReason.LENGTH  # where the worker's own limit is farther than ours
            self.num_output_tokens += num_tokens
            if choice.request.payer is not None:
                choice.request.payer.charge(num_tokens)
        elif finish is None and not slot.prompt_logprobs:
            return
        if choice.hypothesis is not None:
            self._beams.take(group, choice, slot)
            return
        request = choice.request
        first = len(choice.outputs)
        sink = request.sink
        if sink is not None:
            sink.stamp(stamp_s)
            sink.steps.append(
                TokenStep(
                    request.id,
                    request.attempt,
                    choice.index,
                    first,
                    slot.token_ids,
                    finish,
                    slot.stop_token,
                    slot.detail,
                    slot.logprobs,
                    slot.first_prompt,
                    slot.prompt_logprobs,
                    0 if first else choice.num_cached or 0,
                )
            )
        if choice.ticket:
            self._waiting.grow(choice, num_tokens)
        choice.known += num_tokens
        if finish is not None:
            self._lifecycle.end(choice)
        else:
            _remember(choice, slot)

    def _spoil(self, group: Group, seat: Seat) -> None:
        for reader in spoilt(group, seat):
            self._lifecycle.restart(group, reader)

    def _unfetched(self, group: Group, record: PlanRecord, blocks: list[int]) -> None:
        for reader in unfetched(group, record, blocks):
            if record.seats.get(reader.slot) is reader:
                del record.seats[reader.slot]
            self._lifecycle.restart(group, reader)


def _remember(choice: Choice, slot: SlotResult) -> None:
    choice.outputs.extend(slot.token_ids)
    if slot.logprobs:
        choice.logprobs.extend(slot.logprobs)
    if slot.prompt_logprobs:
        if not choice.prompt_logprobs:
            choice.prompt_first = slot.first_prompt
        choice.prompt_logprobs.extend(slot.prompt_logprobs)

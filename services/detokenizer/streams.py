"""All open streams of a detokenizer: turns a batch of tokens into text deltas per gateway."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

import msgspec

from blockyard.services.detokenizer.stream import DecodedText, Stream
from blockyard.services.detokenizer.token_table import AdapterTables, TokenTable, UnknownToken
from blockyard.shared.messages import (
    NO_LOGPROBS,
    FinishReason,
    StreamOpen,
    StreamRef,
    TextDelta,
    TextLogprobs,
    TokenBatch,
    TokenLogprobs,
    TokenRows,
    TokenStep,
    decode_logprobs,
)
from blockyard.shared.token_ids import unpack


def with_tokens(entries: Sequence[TokenLogprobs], table: TokenTable, as_ids: bool) -> list[TextLogprobs]:
    """Returns log-probabilities with the bytes of their tokens. Raises UnknownToken."""
    name = _id_name if as_ids else table.raw
    return [
        TextLogprobs(
            entry.token_id,
            name(entry.token_id),
            entry.logprob,
            entry.rank,
            entry.top_ids,
            [name(token_id) for token_id in entry.top_ids],
            entry.top_logprobs,
        )
        for entry in entries
    ]


def _id_name(token_id: int) -> bytes:
    return b"token_id:%d" % token_id


log = logging.getLogger(__name__)

REPETITION = "repetition_detected"  # reason of a stop


@dataclass(slots=True)
class BatchOutput:
    """The deltas and stops to send after one batch."""

    deltas: defaultdict[int, list[TextDelta]] = field(default_factory=lambda: defaultdict(list))  # by gateway
    stops: list[StreamRef] = field(default_factory=list)  # choices that need no more tokens


class TextStreams:
    """Streams by request and choice. The highest attempt wins, and every stream ends with one final delta."""

    def __init__(self, table: TokenTable) -> None:
        self._tables = AdapterTables(table)
        self._streams: dict[str, dict[int, Stream]] = {}
        self._called: defaultdict[int, dict[int, Stream]] = defaultdict(
            dict
        )  # by scheduler and its number of the stream
        self.num_open = 0
        self.opened_total = 0
        self.tokens_total = 0

    def apply(self, scheduler: int, batch: TokenBatch) -> BatchOutput:
        """Applies opens, rows, steps and closes, in this order."""
        outcome = BatchOutput()
        for opened in batch.opens:
            self._open(scheduler, opened, outcome)
        streams = self._streams
        deltas = outcome.deltas
        for rows in batch.rows:
            self._rows(self._called[scheduler], rows, outcome)
        for step in batch.steps:
            choices = streams.get(step.request_id)
            stream = choices.get(step.choice) if choices is not None else None
            if stream is None or stream.attempt != step.attempt:
                continue  # ended here already, or of an older attempt
            delta = self._step(stream, step, outcome)
            if delta is not None:
                deltas[stream.gateway].append(delta)
        for close in batch.closes:
            self._close(close.request_id, close.attempt)
        return outcome

    def drop_peer(self, incarnation: int) -> set[int]:
        """Closes all streams of a gateway or scheduler that is gone. Returns their schedulers."""
        schedulers = set()
        for request_id in list(self._streams):
            for stream in list(self._streams[request_id].values()):
                if incarnation in (stream.gateway, stream.scheduler):
                    self._forget(stream)
                    schedulers.add(stream.scheduler)
        self._called.pop(incarnation, None)
        return schedulers

    def _open(self, scheduler: int, opened: StreamOpen, outcome: BatchOutput) -> None:
        before = self._streams.get(opened.request_id, {}).get(opened.choice)
        if before is not None:
            if before.attempt >= opened.attempt:
                return
            self._forget(before)
        stream = Stream(scheduler, opened, self._tables.of(opened))
        self._streams.setdefault(opened.request_id, {})[opened.choice] = stream
        if opened.stream:
            self._called[scheduler][opened.stream] = stream
        self.num_open += 1
        self.opened_total += 1
        taken = stream.replay(opened)._replace(used=0)  # an earlier attempt accounted for these ids
        if taken.stop is not None or taken.error or taken.repeats:
            delta = self._final(stream, taken, [], outcome)
        elif taken.text:  # text of delivered ids that was held back
            delta = _delta(stream, [], taken.text)
        else:
            return
        outcome.deltas[stream.gateway].append(delta)

    def _rows(self, called: dict[int, Stream], rows: TokenRows, outcome: BatchOutput) -> None:
        """Applies one more token to each stream."""
        columns = unpack(rows.streams), unpack(rows.firsts), unpack(rows.token_ids)
        all_logprobs = rows.logprobs or repeat(NO_LOGPROBS, len(columns[0]))
        for number, first, token_id, logprobs in zip(*columns, all_logprobs, strict=True):
            stream = called.get(number)
            if stream is None:
                continue  # ended here already
            token_ids = [token_id]
            if stream.count != first or (logprobs is not NO_LOGPROBS and logprobs != NO_LOGPROBS):
                step = _step_of_row(stream, first, token_ids, logprobs)
                delta = self._step(stream, step, outcome)
            else:
                delta = self._plain(stream, token_ids, outcome)
            if delta is not None:
                outcome.deltas[stream.gateway].append(delta)

    def _plain(self, stream: Stream, token_ids: list[int], outcome: BatchOutput) -> TextDelta:
        """Fast path of nearly every token: no finish, no log-probabilities."""
        taken = stream.take(token_ids)
        if taken.stop is not None or taken.error or taken.repeats:
            return self._final(stream, taken, token_ids, outcome)
        self.tokens_total += taken.used
        first = stream.count - taken.used
        return TextDelta(stream.request_id, stream.attempt, stream.choice, first, token_ids, taken.text)

    def _step(self, stream: Stream, step: TokenStep, outcome: BatchOutput) -> TextDelta | None:
        token_ids = step.token_ids
        known = stream.count - step.first
        if known < 0:
            if stream.is_first_gap():
                log.warning(
                    "%s/%d: tokens %d to %d are missing", step.request_id, step.choice, stream.count, step.first
                )
            return None  # the gateway misses them too, and sends the request again
        if known:
            token_ids = token_ids[known:]
            if not token_ids and step.finish is None and not step.prompt_logprobs:
                return None
        extras = step.logprobs or step.prompt_logprobs or step.cached_tokens or step.queued_s is not None
        if step.finish is not None or extras:
            return self._full_step(stream, step, token_ids, known, outcome)
        return self._plain(stream, token_ids, outcome)

    def _full_step(
        self, stream: Stream, step: TokenStep, token_ids: list[int], known: int, outcome: BatchOutput
    ) -> TextDelta | None:
        # as in vLLM, the id that ended it (end-of-sequence, stop id) is counted, and shown if requested
        hidden = 1 if step.finish is FinishReason.STOP and token_ids and not stream.shows_stop else 0
        taken = stream.take(token_ids[: len(token_ids) - hidden])
        logprobs: list[TextLogprobs] = []
        prompt_logprobs: list[TextLogprobs] = []
        try:
            logprobs = with_tokens(step.logprobs[known:], stream.table, stream.as_ids)
            prompt_logprobs = with_tokens(step.prompt_logprobs, stream.table, stream.as_ids)
        except UnknownToken as e:
            taken = taken._replace(error=taken.error or str(e))
        if taken.stop is None and not taken.error and not taken.repeats and step.finish is None:
            self.tokens_total += taken.used
            delta = _delta(stream, token_ids, taken.text)
        else:
            delta = self._final(stream, taken, token_ids, outcome, step, hidden)
        return _with_extras(delta, step, logprobs, prompt_logprobs)

    def _final(
        self,
        stream: Stream,
        taken: DecodedText,
        token_ids: list[int],
        outcome: BatchOutput,
        step: TokenStep | None = None,
        hidden: int = 0,
    ) -> TextDelta:
        """Returns the final delta and removes the stream. Precedence: an error, a stop string, `step`, a repetition.

        A repetition before the last tokens of `step` comes before it.
        """
        ended_early = taken.stop is not None or bool(taken.error) or taken.repeats
        repeats = taken.repeats and (step is None or step.finish is None or taken.used < len(token_ids))
        last = stream.end(0 if ended_early else hidden)
        used = taken.used + last.used
        stop = taken.stop if taken.stop is not None else last.stop
        finish, detail = FinishReason.FAILED, taken.error
        reason: int | str | None = None
        if stop is not None and not taken.error:
            finish, reason = FinishReason.STOP, stop
        elif repeats:
            finish, reason = FinishReason.REPETITION, REPETITION
        elif not taken.error and step is not None and step.finish is not None:
            finish, reason, detail = step.finish, step.stop_token, step.detail
        if step is None or step.finish is None:
            outcome.stops.append(StreamRef(stream.request_id, stream.attempt, stream.choice))
        self.tokens_total += used
        self._forget(stream)
        return TextDelta(
            stream.request_id,
            stream.attempt,
            stream.choice,
            stream.count - used,
            token_ids[:used],
            taken.text + last.text,
            finish,
            reason,
            detail,
        )

    def _close(self, request_id: str, attempt: int) -> None:
        for stream in list(self._streams.get(request_id, {}).values()):
            if stream.attempt <= attempt:
                self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        choices = self._streams[stream.request_id]
        del choices[stream.choice]
        if not choices:
            del self._streams[stream.request_id]
        self._called[stream.scheduler].pop(stream.number, None)
        self.num_open -= 1


def _delta(stream: Stream, token_ids: list[int], text: str) -> TextDelta:
    first = stream.count - len(token_ids)
    return TextDelta(stream.request_id, stream.attempt, stream.choice, first, token_ids, text)


def _with_extras(
    delta: TextDelta, step: TokenStep, logprobs: list[TextLogprobs], prompt_logprobs: list[TextLogprobs]
) -> TextDelta:
    return msgspec.structs.replace(
        delta,
        logprobs=logprobs[: len(delta.token_ids)],
        first_prompt=step.first_prompt,
        prompt_logprobs=prompt_logprobs,
        cached_tokens=step.cached_tokens,
        queued_s=step.queued_s,
        status=step.status,
        kv_transfer_params=step.kv_transfer_params,
    )


def _step_of_row(stream: Stream, first: int, token_ids: list[int], encoded: msgspec.Raw) -> TokenStep:
    """A row of TokenRows. Its stream fails if its log-probabilities are malformed."""
    name = (stream.request_id, stream.attempt, stream.choice, first)
    try:
        logprobs = decode_logprobs(encoded)
    except msgspec.MsgspecError as e:
        return TokenStep(*name, [], FinishReason.FAILED, detail=f"log-probabilities: {e}")
    return TokenStep(*name, token_ids, logprobs=[] if logprobs is None else [logprobs])

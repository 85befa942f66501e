"""Server-sent events of one choice: one write per text delta, of which only the text is encoded anew."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import msgspec

from blockyard.services.api_gateway.apis.interface import PLAIN, ChoiceEvents, Echo, EventFields, Usage
from blockyard.services.api_gateway.apis.openai_fields import encode
from blockyard.services.api_gateway.requests.generate_request import ResponseOptions
from blockyard.services.api_gateway.responses.http_generation import without_output
from blockyard.services.api_gateway.responses.response_writer import ResponseWriter, size_of
from blockyard.services.api_gateway.responses.stream_interval import joined_deltas
from blockyard.shared.messages import TextDelta
from blockyard.shared.output_parsing.parts import Part, PartKind
from blockyard.shared.ring_client.choice_reader import ChoiceReader, joined

CRLF = b"\r\n"
SIZE_LINES = tuple(b"%x\r\n" % n for n in range(2048))  # of HTTP chunks; events are rarely longer
MERGE = 64  # this many kept deltas are merged into one


class EventStream:
    """A journal sink that writes events to the answer's `ResponseWriter`, or keeps the text while that is paused."""

    def __init__(
        self,
        options: ResponseOptions,
        events: ChoiceEvents,
        writer: ResponseWriter,
        usage: Callable[[], Usage],
        reader: ChoiceReader | None = None,
    ) -> None:
        """Without a reader all text is content."""
        self._options, self._events, self._writer, self._usage, self._reader = options, events, writer, usage, reader
        self._around_text, self._stamps, self._no_output = events.around_text, options.stamps, options.no_output
        same = None if options.stamps else events.same_around_text
        # around the text of every event, with the event's length without its text; None: it is another in each
        self._same_around = None if same is None else (same[0], same[1] + CRLF, len(same[0]) + len(same[1]))
        # events that differ in more than text and stamp are built by `_data`
        self._plain = not (options.logprobs or options.continuous_usage or options.token_ids or options.echo)
        # tokens belong to the parts that came with them: several deltas as one would have them all in its last part
        self.merges = reader is None or not options.logprobs
        self._kept: list[Kept] = []
        self._num_unmerged = 0  # how many of the last kept deltas are not merged yet
        self._echo: Echo | None = None
        writer.on_resume(self._write_opening)

    def prepend(self, echo: Echo) -> None:
        """The first event begins with the prompt's text."""
        self._echo = echo

    def push(self, delta: TextDelta, now: float, stamp_s: float) -> None:
        writer, text = self._writer, delta.text
        may_be_plain = self._plain and delta.finish is None and writer.chunked and not writer.paused
        if self._reader is not None:
            if self._no_output:  # before the reader sees the token
                delta = without_output(delta)
            parts = self._reader.push(delta)
            if not may_be_plain or len(parts) != 1 or parts[0].kind is not PartKind.CONTENT:
                self._push_parts(delta, parts, now, stamp_s)
                return
            text = parts[0].text
        elif writer.paused:
            self._keep(Kept(delta, [], stamp_s), size_of(delta))
            return
        elif not may_be_plain:
            self._write(Kept(delta, [], stamp_s), now)
            return
        if text:
            if self._same_around is not None:
                head, tail, size = self._same_around
            elif around := self._around_text(text, stamp_s if self._stamps else None):
                head, tail, size = around[0], around[1] + CRLF, len(around[0]) + len(around[1])
            else:
                self._write(Kept(delta, [Part(PartKind.CONTENT, text)], stamp_s), now)
                return
            encoded = encode(text)
            size += len(encoded)
            size_line = SIZE_LINES[size] if size < len(SIZE_LINES) else b"%x\r\n" % size
            writer.write(b"".join((size_line, head, encoded, tail)), now)

    def _push_parts(self, delta: TextDelta, parts: list[Part], now: float, stamp_s: float) -> None:
        """Pushes text that a parser has read: see `push`."""
        if self._writer.paused:
            self._keep(Kept(msgspec.structs.replace(delta, text=""), parts, stamp_s), size_of(delta))
        elif not self._plain or self._options.stamps or delta.finish is not None:
            self._write(Kept(delta, parts, stamp_s), now)
        elif parts:
            event = self._events.event
            data = event(parts[0], PLAIN) if len(parts) == 1 else b"".join([event(part, PLAIN) for part in parts])
            if data:
                self._writer.write(self._writer.frame(data), now)

    def _write_opening(self, now: float) -> None:
        usage = self._usage() if self._options.continuous_usage or self._options.usage_at_start else None
        if usage is not None:  # output may wait behind it
            usage = replace(usage, completion=0, reasoning=None if usage.reasoning is None else 0)
        if event := self._events.opening(usage):
            self._writer.write_unpaused(event, now)

    def _keep(self, one: "Kept", num_bytes: int) -> None:
        """Keeps the delta until the writer resumes. Small deltas are merged, because one object takes less memory."""
        kept = self._kept
        if not kept:
            self._writer.on_resume(self._write_kept)
        kept.append(one)
        self._num_unmerged += 1
        if self._num_unmerged == MERGE and self.merges:
            kept[-MERGE:] = [merged(kept[-MERGE:])]
            self._num_unmerged = 0
        self._writer.keep(num_bytes)

    def _write_kept(self, now: float) -> None:
        """Writes the kept deltas as one larger event, or one for each part; with log-probabilities each on its own."""
        kept, self._kept, self._num_unmerged = self._kept, [], 0
        if kept and self.merges:
            self._write(merged(kept), now)
        elif data := b"".join([self._part_events(one) for one in kept]):
            self._writer.write(self._writer.frame(data), now)

    def _write(self, one: "Kept", now: float) -> None:
        if data := self._text_event(one) if self._reader is None else self._part_events(one):
            self._writer.write(self._writer.frame(data), now)

    def _text_event(self, one: "Kept") -> bytes:
        """Empty for a delta that shows nothing: held-back text, or prompt log-probabilities."""
        delta, text = one.delta, one.delta.text
        if not delta.token_ids and not text and delta.finish is None:
            return b""
        if not text and delta.finish is None and self._plain:
            return b""
        if self._no_output:
            delta, text = without_output(delta), ""
        return self._events.event(Part(PartKind.CONTENT, text), self._fields(delta, one.stamp_s))

    def _part_events(self, one: "Kept") -> bytes:
        """An event for each part. The delta's other fields are in the last one, which at the end has no part."""
        delta, event = one.delta, self._events.event
        plain = self._fields_between(one.stamp_s)
        if self._plain and delta.finish is None:
            return b"".join([event(part, plain) for part in one.parts])
        parts: list[Part | None] = [*one.parts]
        if delta.finish is not None or (one.parts[-1].kind == PartKind.CALL_END if one.parts else delta.token_ids):
            parts.append(None)
        last = self._fields(delta, one.stamp_s)
        return b"".join([event(part, last if i == len(parts) else plain) for i, part in enumerate(parts, start=1)])

    def _fields(self, delta: TextDelta, stamp_s: float) -> EventFields:
        options = self._options
        echo, self._echo = self._echo, None
        return EventFields(
            delta.finish,
            delta.stop_reason,
            delta.logprobs if options.logprobs else None,
            delta.token_ids if options.token_ids else None,
            self._usage() if options.continuous_usage else None,
            stamp_s if options.stamps else None,
            echo,
        )

    def _fields_between(self, stamp_s: float) -> EventFields:
        """Fields of an event that is not the last of its delta."""
        options = self._options
        if not (options.stamps or options.continuous_usage):
            return PLAIN
        usage = self._usage() if options.continuous_usage else None
        return EventFields(usage=usage, stamp_s=stamp_s if options.stamps else None)


class Kept(NamedTuple):
    """A delta, or several as one. A reader's deltas have parts in place of text."""

    delta: TextDelta
    parts: list[Part]
    stamp_s: float


def merged(kept: list[Kept]) -> Kept:
    """Several deltas of a choice, in order, as one."""
    if len(kept) == 1:
        return kept[0]
    delta = joined_deltas([one.delta for one in kept])
    return Kept(delta, joined([part for one in kept for part in one.parts]), kept[-1].stamp_s)

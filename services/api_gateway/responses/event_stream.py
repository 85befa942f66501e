"""Server-sent events of one choice. One write a step: prefix, text, suffix, of which only the text is new."""

from collections.abc import Callable

import msgspec

from blockyard.services.api_gateway.responses.chunks import NULL, Shape, close, encode, head, role_event, tail
from blockyard.services.api_gateway.responses.echo import Echo, without_output
from blockyard.services.api_gateway.responses.logprobs import chat_logprobs, completion_logprobs
from blockyard.services.api_gateway.responses.response_writer import BUFFER_LIMIT, SIZES, Outlet
from blockyard.services.api_gateway.responses.unread import size_of
from blockyard.shared.messages import TextDelta
from blockyard.shared.token_ids import unpack

CRLF = b"\r\n"
MERGE = 64  # deltas that are kept become one


class EventStream:
    """A journal sink that writes events to its answer's outlet, or keeps the text while that is behind."""

    __slots__ = (
        "_fixed",
        "_head",
        "_kept",
        "_num_loose",
        "_offset",
        "_open_tail",
        "_outlet",
        "_plain",
        "_prompt_ids",
        "_shape",
        "_tail",
        "_usage",
        "echo",
    )

    def __init__(self, shape: Shape, index: int, outlet: Outlet, usage: Callable[[], bytes], prompt_ids: bytes) -> None:
        self._shape, self._outlet, self._usage = shape, outlet, usage
        self._head = head(shape, index)
        self._open_tail = tail(shape)
        self._tail = self._open_tail + close(None) + CRLF
        self._fixed = len(self._head) + len(self._tail) - len(CRLF)
        # what differs from event to event in more than its text and stamp takes the long way
        self._plain = not (shape.logprobs or shape.continuous_usage or shape.token_ids or shape.echo)
        self._kept: list[tuple[TextDelta, float]] = []
        self._num_loose = 0  # of these, at their end, are not merged
        self._offset = 0  # where the next token's text begins, for text_offset
        self.echo: Echo | None = None
        self._prompt_ids = unpack(prompt_ids) if shape.token_ids else None  # until the first event
        if shape.chat:
            outlet.on_catch_up(lambda now: self._write_role(index, now))

    def push(self, delta: TextDelta, now: float, stamp_s: float) -> None:
        outlet = self._outlet
        if outlet.behind:
            self._keep(delta, stamp_s)
        elif self._plain and delta.finish is None and outlet.chunked:
            if delta.text:
                self._write_plain(delta.text, now, stamp_s)
        else:
            self._write(delta, now, stamp_s)

    def _write_role(self, index: int, now: float) -> None:
        """The first event of a chat choice; the first choice's has the prompt's ids, which are those of the answer."""
        shape, prompt_ids, self._prompt_ids = self._shape, self._prompt_ids, None
        usage = self._usage() if shape.continuous_usage else NULL
        self._outlet.write(role_event(shape, index, prompt_ids if index == 0 else None, usage), now)

    def _keep(self, delta: TextDelta, stamp_s: float) -> None:
        """For when the client has caught up. Many small deltas are one that is smaller than all of them."""
        kept = self._kept
        if not kept:
            self._outlet.on_catch_up(self._bring)
        kept.append((delta, stamp_s))
        self._num_loose += 1
        if self._num_loose == MERGE:
            kept[-MERGE:] = [(merged([delta for delta, _ in kept[-MERGE:]]), stamp_s)]
            self._num_loose = 0
        self._outlet.unread.keep(self._outlet, size_of(delta))

    def _write_plain(self, text: str, now: float, stamp_s: float) -> None:
        outlet, encoded, tail = self._outlet, encode(text), self._tail
        transport = outlet.transport
        size = self._fixed + len(encoded)
        if self._shape.stamps:
            tail = self._open_tail + close(stamp_s) + CRLF
            size += len(tail) - len(self._tail)
        if transport is None or transport.is_closing():  # the write would raise, or be counted as an error
            return
        size_line = SIZES[size] if size < len(SIZES) else b"%x\r\n" % size
        transport.write(b"".join((size_line, self._head, encoded, tail)))
        outlet.wrote_s = now
        if transport.get_write_buffer_size() > BUFFER_LIMIT:
            outlet.fall_behind(now)

    def _write(self, delta: TextDelta, now: float, stamp_s: float) -> None:
        outlet = self._outlet
        if event := self._event(delta, stamp_s):
            outlet.write(event, now)
            if outlet.transport is not None and outlet.transport.get_write_buffer_size() > BUFFER_LIMIT:
                outlet.fall_behind(now)

    def _event(self, delta: TextDelta, stamp_s: float) -> bytes:
        """Empty where there is nothing to tell: text that is held back, or prompt log-probabilities."""
        shape, text, logprobs = self._shape, delta.text, NULL
        if not delta.token_ids and not text and delta.finish is None:
            return b""
        if not text and delta.finish is None and self._plain:
            return b""
        if shape.no_output:
            delta, text = without_output(delta), ""
        if shape.logprobs:
            logprobs = self._logprobs(delta)
        if self.echo is not None:
            text = self.echo.text + text
            self.echo = None
        prompt_ids, self._prompt_ids = self._prompt_ids, None
        end = tail(
            shape,
            logprobs=logprobs,
            finish=delta.finish,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if shape.token_ids else None,
            prompt_token_ids=prompt_ids,
            usage=self._usage() if shape.continuous_usage else NULL,
        )
        return self._head + encode(text) + end + close(stamp_s if shape.stamps else None)

    def _logprobs(self, delta: TextDelta) -> bytes:
        if self._shape.chat:
            return encode(chat_logprobs(delta.logprobs, self._shape.num_top))
        tokens, first_piece = delta.logprobs, None
        if self.echo is not None:
            tokens, first_piece = [*self.echo.logprobs, *tokens], self.echo.first_piece
        shown = completion_logprobs(tokens, self._shape.num_top, self._offset, first_piece)
        self._offset += sum(map(len, shown.tokens))
        return encode(shown)

    def _bring(self, now: float) -> None:
        """What was kept, as one larger event."""
        kept, self._kept, self._num_loose = self._kept, [], 0
        if kept:
            self._write(merged([delta for delta, _ in kept]), now, kept[-1][1])


def merged(deltas: list[TextDelta]) -> TextDelta:
    """Several deltas of a choice, in order, as one."""
    if len(deltas) == 1:
        return deltas[0]
    return msgspec.structs.replace(
        deltas[-1],
        first=deltas[0].first,
        token_ids=[t for d in deltas for t in d.token_ids],
        text="".join(d.text for d in deltas),
        logprobs=[p for d in deltas for p in d.logprobs],
    )

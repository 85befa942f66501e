"""Server-sent events of one choice: one write per text delta, of which only the text is encoded anew."""

from collections.abc import Callable

import msgspec

from blockyard.services.api_gateway.requests.generate_request import ResponseOptions
from blockyard.services.api_gateway.responses.chunks import NULL, close, encode, head, role_event, tail
from blockyard.services.api_gateway.responses.http_generation import Echo, without_output
from blockyard.services.api_gateway.responses.logprobs import chat_logprobs, completion_logprobs
from blockyard.services.api_gateway.responses.response_writer import ResponseWriter, size_of
from blockyard.shared.messages import TextDelta
from blockyard.shared.token_ids import unpack

CRLF = b"\r\n"
SIZE_LINES = tuple(b"%x\r\n" % n for n in range(2048))  # of HTTP chunks; events are rarely longer
MERGE = 64  # this many kept deltas are merged into one


class EventStream:
    """A journal sink that writes events to the answer's `ResponseWriter`, or keeps the text while that is paused."""

    __slots__ = (
        "_echo",
        "_fixed",
        "_head",
        "_kept",
        "_num_unmerged",
        "_offset",
        "_open_tail",
        "_options",
        "_plain",
        "_prompt_ids",
        "_tail",
        "_usage",
        "_writer",
    )

    def __init__(
        self,
        options: ResponseOptions,
        index: int,
        writer: ResponseWriter,
        usage: Callable[[], bytes],
        prompt_ids: bytes,
    ) -> None:
        self._options, self._writer, self._usage = options, writer, usage
        self._head = head(options, index)
        self._open_tail = tail(options)
        self._tail = self._open_tail + close(None) + CRLF
        self._fixed = len(self._head) + len(self._tail) - len(CRLF)
        # events that differ in more than text and stamp are built by `_event`
        self._plain = not (options.logprobs or options.continuous_usage or options.token_ids or options.echo)
        self._kept: list[tuple[TextDelta, float]] = []
        self._num_unmerged = 0  # how many of the last kept deltas are not merged yet
        self._offset = 0  # where the next token's text begins, for text_offset
        self._echo: Echo | None = None
        self._prompt_ids = unpack(prompt_ids) if options.token_ids else None  # None after the first event
        if options.chat:
            writer.on_resume(lambda now: self._write_role(index, now))

    def prepend(self, echo: Echo) -> None:
        """The first event begins with the prompt's text."""
        self._echo = echo

    def push(self, delta: TextDelta, now: float, stamp_s: float) -> None:
        writer = self._writer
        if writer.paused:
            self._keep(delta, stamp_s)
        elif not self._plain or delta.finish is not None or not writer.chunked:
            self._write(delta, now, stamp_s)
        elif delta.text:
            encoded, tail = encode(delta.text), self._tail
            size = self._fixed + len(encoded)
            if self._options.stamps:
                tail = self._open_tail + close(stamp_s) + CRLF
                size += len(tail) - len(self._tail)
            size_line = SIZE_LINES[size] if size < len(SIZE_LINES) else b"%x\r\n" % size
            writer.write(b"".join((size_line, self._head, encoded, tail)), now)

    def _write_role(self, index: int, now: float) -> None:
        """The first event of a chat choice; that of choice 0 also has the answer's prompt ids."""
        options, prompt_ids, self._prompt_ids = self._options, self._prompt_ids, None
        usage = self._usage() if options.continuous_usage else NULL
        self._writer.write_unpaused(role_event(options, index, prompt_ids if index == 0 else None, usage), now)

    def _keep(self, delta: TextDelta, stamp_s: float) -> None:
        """Keeps the delta until the writer resumes. Small deltas are merged, because one object takes less memory."""
        kept = self._kept
        if not kept:
            self._writer.on_resume(self._write_kept)
        kept.append((delta, stamp_s))
        self._num_unmerged += 1
        if self._num_unmerged == MERGE:
            kept[-MERGE:] = [(merged([delta for delta, _ in kept[-MERGE:]]), stamp_s)]
            self._num_unmerged = 0
        self._writer.keep(size_of(delta))

    def _write_kept(self, now: float) -> None:
        """Writes the kept deltas as one larger event."""
        kept, self._kept, self._num_unmerged = self._kept, [], 0
        if kept:
            self._write(merged([delta for delta, _ in kept]), now, kept[-1][1])

    def _write(self, delta: TextDelta, now: float, stamp_s: float) -> None:
        if event := self._event(delta, stamp_s):
            self._writer.write(self._writer.frame(event), now)

    def _event(self, delta: TextDelta, stamp_s: float) -> bytes:
        """Empty for a delta that shows nothing: held-back text, or prompt log-probabilities."""
        options, text, logprobs = self._options, delta.text, NULL
        if not delta.token_ids and not text and delta.finish is None:
            return b""
        if not text and delta.finish is None and self._plain:
            return b""
        if options.no_output:
            delta, text = without_output(delta), ""
        if options.logprobs:
            logprobs = self._logprobs(delta)
        if self._echo is not None:
            text = self._echo.text + text
            self._echo = None
        prompt_ids, self._prompt_ids = self._prompt_ids, None
        end = tail(
            options,
            logprobs=logprobs,
            finish=delta.finish,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if options.token_ids else None,
            prompt_token_ids=prompt_ids,
            usage=self._usage() if options.continuous_usage else NULL,
        )
        return self._head + encode(text) + end + close(stamp_s if options.stamps else None)

    def _logprobs(self, delta: TextDelta) -> bytes:
        if self._options.chat:
            return encode(chat_logprobs(delta.logprobs, self._options.num_top))
        tokens, first_token = delta.logprobs, None
        if self._echo is not None:
            tokens, first_token = [*self._echo.logprobs, *tokens], self._echo.first_token
        shown = completion_logprobs(tokens, self._options.num_top, self._offset, first_token)
        self._offset += sum(map(len, shown.tokens))
        return encode(shown)


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

"""Reads the text of one choice into parts while it arrives."""

import logging
from collections.abc import Callable

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import TextDelta
from blockyard.shared.output_parsing.cut_calls import CutCalls
from blockyard.shared.output_parsing.parts import Part, PartKind
from blockyard.shared.output_parsing.reader import Format, OutputReader
from blockyard.shared.ring_client.request_fields.output_format import (
    OutputForm,
    OutputFormats,
    ReasoningMeter,
    answer_format,
    call_id_form,
    cut_calls,
    format_names,
)
from blockyard.shared.ring_client.request_fields.tools import ToolUse
from blockyard.shared.tool_parsers.interface import CallId, new_call_id

log = logging.getLogger(__name__)

AS_THEY_ARE = (PartKind.CONTENT, PartKind.ARGUMENTS)  # parts that are shown unchanged


class ChoiceReader:
    """Lives as long as the client's connection: it is given each delta once, also after a request was sent again.

    Every call gets an id, other than those of the calls before. Reasoning is left out if the client does not want it,
    and so is the beginning of a call in which the answer ends. A format that raises ends the choice's parts, and
    `on_error` is told.
    """

    def __init__(
        self,
        read: Format,
        meter: ReasoningMeter,
        call_id: CallId,
        shows_reasoning: bool,
        on_error: Callable[[Exception], None],
        cut: Callable[[], CutCalls] = CutCalls,
    ) -> None:
        """`meter` watches the format `read`; `cut` is called at the end of the answer."""
        self._reader: OutputReader | None = OutputReader(read)
        self._meter, self._call_id, self._shows_reasoning, self._on_error = meter, call_id, shows_reasoning, on_error
        self._as_they_are = (*AS_THEY_ARE, PartKind.REASONING) if shows_reasoning else AS_THEY_ARE
        self._cut = cut
        self._last: PartKind | None = None  # of the parts so far
        self._num_calls = 0
        self._ids: set[str] = set()  # of the calls so far

    @property
    def num_reasoning(self) -> int:
        """Tokens of reasoning so far."""
        return self._meter.num_tokens

    def push(self, delta: TextDelta) -> list[Part]:
        """The parts to show that this delta makes certain."""
        reader = self._reader
        if reader is None:
            return []
        try:
            parts = self._read_last(reader, delta.text) if delta.finish is not None else reader.push(delta.text)
        except Exception as e:  # a format may be a user's: it ends this request and no other
            log.warning("an answer could not be read", exc_info=True)
            self._reader = None
            self._on_error(e)
            return []
        if parts:
            self._last = parts[-1].kind
        self._meter.count(len(delta.token_ids))
        if len(parts) == 1 and parts[0].kind in self._as_they_are:  # nearly every token
            return parts
        return [shown for part in parts if (shown := self._shown(part)) is not None]

    def _read_last(self, reader: OutputReader, text: str) -> list[Part]:
        cut = self._cut()
        text, cut_character = cut.without_cut_character(text)
        parts = reader.push(text)
        last = parts[-1].kind if parts else self._last
        return parts + cut.left_out(reader.finish(), last, cut_character)

    def _shown(self, part: Part) -> Part | None:
        if part.kind == PartKind.CALL:
            return self._with_id(part)
        return None if part.kind == PartKind.REASONING and not self._shows_reasoning else part

    def _with_id(self, part: Part) -> Part:
        """The call with its own id. A model may write one id twice, and clients tell calls apart by them."""
        call_id, index = part.call_id, self._num_calls
        while not call_id or call_id in self._ids:
            call_id, index = new_call_id(self._call_id, part.text, index), index + 1
        self._num_calls += 1
        self._ids.add(call_id)
        return part._replace(call_id=call_id)


def open_reader(
    form: OutputForm,
    use: ToolUse | None,
    formats: OutputFormats,
    opened: bool | None,
    shows_reasoning: bool,
    on_error: Callable[[RequestError], None],
) -> ChoiceReader:
    """The reader of one choice. `opened` says how its prompt ends: see `ReasoningFormat`."""
    meter = ReasoningMeter()

    def failed(cause: Exception) -> None:
        reason = f"{format_names(form, formats)} failed at this answer: {type(cause).__name__}: {cause}"
        on_error(RequestError(reason, status=422, code="output_parser_failed"))

    read = answer_format(form, use, formats, opened, meter)
    return ChoiceReader(
        read, meter, call_id_form(formats), shows_reasoning, failed, lambda: cut_calls(form, use, formats)
    )


def joined(parts: list[Part]) -> list[Part]:
    """Pieces of one kind that follow each other as one part."""
    out: list[Part] = []
    pieces: list[str] = []
    for part in parts:
        if out and part.kind == out[-1].kind and part.kind not in (PartKind.CALL, PartKind.CALL_END):
            pieces.append(part.text)
            continue
        if pieces:
            out[-1] = Part(out[-1].kind, out[-1].text + "".join(pieces))
            pieces = []
        out.append(part)
    if pieces:
        out[-1] = Part(out[-1].kind, out[-1].text + "".join(pieces))
    return out

"""Texts of requests and answers in the log: --enable-log-outputs, and --max-log-len beside --enable-log-requests."""

import logging

from blockyard.services.api_gateway.responses.full_response import CollectedChoice
from blockyard.services.api_gateway.responses.http_generation import HttpGeneration
from blockyard.services.api_gateway.responses.stream_interval import PacedStream
from blockyard.shared.messages import TextDelta, Tokenize, Tokenized
from blockyard.shared.ring_client.journal import Sink
from blockyard.shared.token_ids import ID_BYTES, num_ids, unpack

log = logging.getLogger(__name__)


class LoggedStream:
    """A journal sink that logs the text which it passes on, and keeps it for the line at the answer's end."""

    def __init__(self, sink: Sink, name: str, logs_deltas: bool, max_len: int | None) -> None:
        """name: of the choice. max_len: characters of a text in a line; None: all."""
        self._sink, self._name, self._logs_deltas, self._max_len = sink, name, logs_deltas, max_len
        self._texts: list[str] = []

    def text(self) -> str:
        return "".join(self._texts)

    def push(self, delta: TextDelta, now: float, stamp_s: float) -> None:
        if delta.text:
            self._texts.append(delta.text)
            if self._logs_deltas:
                log.info("%s: delta %s", self._name, shown(delta.text, self._max_len))
        self._sink.push(delta, now, stamp_s)


def log_outputs(generation: HttpGeneration, max_len: int | None) -> None:
    """Logs the text of each choice of an answer that has ended, without the marks that a parser has read."""
    if generation.request.options.no_output:
        return
    for entry in generation.entries:
        for choice in entry.choices:
            sink = choice.sink.inner if isinstance(choice.sink, PacedStream) else choice.sink
            if isinstance(sink, LoggedStream):
                text = sink.text()
            else:
                assert isinstance(sink, CollectedChoice)
                text = "".join(part.text for part in sink.parts())
            end = "not finished" if choice.finish is None else choice.finish.name.lower()
            name = choice_name(generation, entry.request_id, choice.index)
            log.info("%s: %d tokens, %s: %s", name, len(choice.output_ids), end, shown(text, max_len))


def choice_name(generation: HttpGeneration, request_id: str, index: int) -> str:
    """The answer's id, and which prompt and choice of it, if there are several."""
    request = generation.request
    prompt = f" prompt {request_id.rpartition('-')[2]}" if generation.num_prompts > 1 else ""
    choice = f" choice {index}" if request.choices.computed > 1 else ""
    return f"{request.options.answer_id}{prompt}{choice}"


def prompt_text(asked: Tokenize, prompt: Tokenized, max_len: int) -> str:
    """The beginning of a prompt: its text, or its ids if it was given as ids."""
    if asked.token_ids is None:
        return shown(prompt.text or asked.text or "", max_len)
    ids = unpack(prompt.token_ids[: max_len * ID_BYTES])
    return f"ids {ids}" + _more(num_ids(prompt.token_ids) - len(ids))


def shown(text: str, max_len: int | None) -> str:
    """Returns the beginning of a text on one line, with unprintable characters escaped: no text forges a line."""
    part = text if max_len is None else text[:max_len]
    return repr(part) + _more(len(text) - len(part))


def _more(number: int) -> str:
    return f" and {number} more" if number else ""

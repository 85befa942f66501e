"""Answers that are not streamed: collects the choices' text until it is complete."""

from blockyard.services.api_gateway.apis.interface import Echo, FinishedChoice
from blockyard.services.api_gateway.responses.http_generation import HttpGeneration, without_output
from blockyard.shared.messages import FinishReason, TextDelta, TextLogprobs
from blockyard.shared.output_parsing.parts import Part, PartKind
from blockyard.shared.ring_client.choice_reader import ChoiceReader
from blockyard.shared.ring_client.journal import ChoiceLog, JournalEntry
from blockyard.shared.ring_client.request_fields.choices import best
from blockyard.shared.token_ids import unpack


class CollectedChoice:
    """A journal sink that keeps everything until the answer is complete."""

    def __init__(self, no_output: bool, reader: ChoiceReader | None = None) -> None:
        """Without a reader all text is content."""
        self._no_output, self._reader = no_output, reader
        self._parts: list[Part] = []  # with a reader
        self.logprob_ends: list[int] = []  # for each part; without a reader, empty
        self.text: list[str] = []
        self.logprobs: list[TextLogprobs] = []
        self.finish = FinishReason.FAILED
        self.stop_reason: int | str | None = None
        self.echo: Echo | None = None

    def prepend(self, echo: Echo) -> None:
        """The answer begins with the prompt's text."""
        self.echo = echo

    def parts(self) -> list[Part]:
        return [Part(PartKind.CONTENT, "".join(self.text))] if self._reader is None else self._parts

    def push(self, delta: TextDelta, now: float, stamp_s: float) -> None:
        if self._no_output:
            delta = without_output(delta)
        if self._reader is None:
            self.text.append(delta.text)
        else:
            parts = self._reader.push(delta)
            self._parts += parts
            if delta.logprobs:  # the delta's tokens belong to its last part
                self.logprob_ends += [len(self.logprobs)] * (len(self._parts) - len(self.logprob_ends))
                if parts:
                    self.logprob_ends[-1] += len(delta.logprobs)
        self.logprobs.extend(delta.logprobs)
        if delta.finish is not None:
            self.finish, self.stop_reason = delta.finish, delta.stop_reason


def encode_full_response(generation: HttpGeneration) -> bytes:
    """The body of a finished generation. Its sinks must be `CollectedChoice`."""
    options, count = generation.request.options, generation.request.choices.returned
    choices = [_finished(generation, entry, *pair) for entry in generation.entries for pair in _best(entry, count)]
    return generation.api.whole(options, choices, generation.usage())


def _best(entry: JournalEntry, count: int) -> list[tuple[ChoiceLog, CollectedChoice]]:
    pairs = [(choice, choice.sink) for choice in entry.choices if isinstance(choice.sink, CollectedChoice)]
    return best(pairs, [sink.logprobs for _, sink in pairs], count)


def _finished(
    generation: HttpGeneration, entry: JournalEntry, choice: ChoiceLog, sink: CollectedChoice
) -> FinishedChoice:
    options = generation.request.options
    output_ids = [] if options.no_output else choice.output_ids.tolist()
    return FinishedChoice(
        sink.parts(),
        sink.finish,
        sink.stop_reason,
        sink.logprobs,
        entry.prompt_logprobs,
        output_ids if options.token_ids else None,
        unpack(entry.request.prompt_ids) if options.token_ids else None,
        sink.echo,
        sink.logprob_ends,
        generation.prompt_text(entry) if options.prompt_text else None,
        entry.kv_transfer_params,
    )

"""The interface of reasoning formats."""

from collections.abc import Callable
from dataclasses import dataclass

from blockyard.shared.output_parsing.parts import PartKind, Reading
from blockyard.shared.output_parsing.reader import read_all
from blockyard.shared.output_parsing.text_input import TextInput


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A value of --reasoning-parser.

    `read` reads an answer from its first character to the end of its reasoning; formats with several stretches of
    reasoning read the whole answer. Its second argument says how the prompt ends: True behind `start`, False behind
    `end`, None behind neither.
    """

    name: str
    models: str
    end: str  # ends reasoning: grammars begin behind it, and a budget of tokens forces it
    read: Callable[[TextInput, bool | None], Reading[None]]
    start: str = ""
    markers: tuple[str, ...] = ()  # special tokens: shown to `read`, hidden from the client
    aliases: tuple[str, ...] = ()
    template_marks: tuple[str, ...] = ()  # `auto` picks the format with all its marks in the chat template
    other_ends: tuple[str, ...] = ()  # texts that end reasoning for `read` as well; no grammar begins behind them
    answer_marks: tuple[str, ...] = ()  # tags around the answer that follows, which `compose.without_marks` removes


def opens_by_itself(of: ReasoningFormat) -> bool:
    """Whether an answer reasons from its first character where neither prompt nor answer has the marker `start`."""
    parts = read_all(lambda text: of.read(text, None), "a")
    return bool(parts) and parts[0].kind == PartKind.REASONING

"""The interface of tool-call formats: how calls are read and forced, and how names and ids are spelt."""

import enum
import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blockyard.shared.output_parsing.parts import Reading
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules
from blockyard.shared.tool_parsers.tools import Tool

ALPHANUMERIC = string.ascii_letters + string.digits


class CallId(enum.Enum):
    """How the ids of calls are spelt, because templates of some families want them back in their form."""

    OPENAI = "call_ and 24 letters or digits"
    MISTRAL = "9 letters or digits"
    KIMI = "functions.NAME:INDEX"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A value of --tool-call-parser.

    `read` reads a whole answer behind its reasoning, given the tools that the answer may call. Text that is no call is
    content, a call whose beginning is malformed too: no character is lost, and nothing is raised. CALL_END follows the
    last argument at once: one that only the end of the text brings is of a call that was cut.
    `write_grammar` returns a Lark expression for one or more calls (one alone without the last argument), with rules
    that it adds: what it allows is read back by `read`. `openings` are the texts with which calls of these tools begin,
    if that is not the first of `markers`: text before calls that are not forced has none of them, and from one on the
    beginning of a call in which an answer ends is not shown (`output_parsing/cut_calls.py`). The first quoted text or
    marker of calls in the grammar has all of the first of them.
    """

    name: str
    models: str  # families that write it, for the table of documents
    read: Callable[[TextInput, Sequence[Tool]], Reading[None]]
    write_grammar: Callable[[GrammarRules, Sequence[Tool], bool], str]
    markers: tuple[str, ...] = ()  # special tokens of the format: shown to `read`, hidden from the client
    aliases: tuple[str, ...] = ()  # other names of the same format
    openings: Callable[[Sequence[Tool]], Sequence[str]] | None = None
    template_marks: tuple[str, ...] = ()  # `auto` picks the format with all its marks in the chat template
    call_id: CallId = CallId.OPENAI
    # A Lark expression for whole answers that may call these tools, where answers are messages with headers. The last
    # argument is the expression of the text that a client sees; empty: any text
    write_answer: Callable[[GrammarRules, Sequence[Tool], str], str] | None = None
    # `read` yields reasoning too, and reads answers from their first character, where its grammar begins as well
    reads_reasoning: bool = False
    # The special token of the grammar of forced calls that ends reasoning and comes nowhere else in it
    reasoning_end: str = ""


def new_call_id(form: CallId, name: str, index: int) -> str:
    """The id of an answer's call number `index`, which calls the tool `name`."""
    match form:
        case CallId.OPENAI:
            return "call_" + "".join(secrets.choice(ALPHANUMERIC) for _ in range(24))
        case CallId.MISTRAL:
            return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))
        case CallId.KIMI:
            return f"functions.{name}:{index}"

"""The grammar of an answer in a format of tool calls: of forced calls, or of text that calls may follow."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from blockyard.shared.tool_parsers.grammar_rules import GrammarRules
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.tools import Tool


class CallsSource(NamedTuple):
    """A grammar of the kind LARK, as two fields of `Grammar`."""

    source: str
    markers: list[str]


def calls_source(
    tool_format: ToolFormat,
    tools: Sequence[Tool],
    parallel: bool,
    forced: bool,
    write_content: Callable[[GrammarRules], str] | None = None,
    only_texts: bool = False,
) -> CallsSource | None:
    """The grammar of answers that call these tools, or one of them once if they are not `parallel`.

    `forced`: calls and nothing else. Otherwise the answer is text that ends, or is followed by calls: once the text
    that opens a call was written, a call has to follow. With `write_content` the answer is either what that writes, or
    calls. `only_texts`: of the arguments only the texts of custom tools are limited. None if the format does not say
    which text opens calls, or if nothing would be limited.
    """
    rules = GrammarRules(only_texts)
    if tool_format.write_answer is not None and not forced:
        content = "" if write_content is None else write_content(rules)
        answer = tool_format.write_answer(rules, tools, content)
        return CallsSource(rules.source(answer), rules.markers) if rules.has_texts or not only_texts else None
    calls = tool_format.write_grammar(rules, tools, parallel)
    if only_texts and not rules.has_texts:
        return None
    if forced:
        return CallsSource(rules.source(calls), rules.markers)
    if write_content is not None:
        return CallsSource(rules.source(f"{calls} | {write_content(rules)}"), rules.markers)
    openings = tool_format.markers[:1] if tool_format.openings is None else tool_format.openings(tools)
    if not openings:
        return None
    text = rules.text_without(openings)
    return CallsSource(rules.source(f"{text} ({calls})?"), rules.markers)

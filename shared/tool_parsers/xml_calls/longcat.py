"""LongCat: <longcat_tool_call>{"name": ..., "arguments": {...}}</longcat_tool_call> for each call, or tags in it.

LongCat Flash Chat and Thinking write the object, by their model cards. Later models, such as Flash Lite, write
NAME, and for each argument <longcat_arg_key>KEY</longcat_arg_key> and <longcat_arg_value>VALUE</longcat_arg_value>.
"""

from collections.abc import Sequence

from blockyard.shared.errors import RequestError
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.json_calls.json_call import write_call
from blockyard.shared.tool_parsers.tools import Tool
from blockyard.shared.tool_parsers.xml_calls.json_or_tags import either_reader
from blockyard.shared.tool_parsers.xml_calls.tagged_call import TaggedCall, TaggedCalls

START, END = "<longcat_tool_call>", "</longcat_tool_call>"
KEY, KEY_END = "<longcat_arg_key>", "</longcat_arg_key>"
VALUE, VALUE_END = "<longcat_arg_value>", "</longcat_arg_value>"
MARKERS = (START, END, KEY, KEY_END, VALUE, VALUE_END)
TAGGED = TaggedCalls(
    TaggedCall(
        start=START,
        name_end="",
        end=END,
        key=KEY,
        key_end=KEY_END,
        value=VALUE,
        value_end=VALUE_END,
        special=MARKERS,
    ),
    between="",
)


def write_grammar(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    """The model picks the form that it was trained on. Schemas that tags cannot enforce leave the object."""
    objects = rules.repeated(
        f'{rules.marker(START)} "\\n" {write_call(rules, tools)} "\\n" {rules.marker(END)}', parallel
    )
    try:
        tagged = TAGGED.write_grammar(rules, tools, parallel)
    except RequestError:
        return objects
    return f"({objects} | {tagged})"


LONGCAT = ToolFormat(
    name="longcat",
    models="LongCat Flash Chat, Thinking and Lite",
    read=either_reader(TAGGED),
    write_grammar=write_grammar,
    markers=MARKERS,
    template_marks=(START,),
)

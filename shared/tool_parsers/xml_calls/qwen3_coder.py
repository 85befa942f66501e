"""Qwen3-Coder: <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>, with line breaks.

A line break behind the tag before a value and one before the tag behind it belong to the tags. Some answers leave
<tool_call> out.
"""

from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.xml_calls.tagged_call import TaggedCall, TaggedCalls

START, END = "<tool_call>", "</tool_call>"
CALLS = TaggedCalls(
    TaggedCall(
        start="<function=",
        name_end=">",
        end="</function>",
        key="<parameter=",
        key_end=">",
        value_end="</parameter>",
        padding="\n",
        special=(START, END),
        outer_end=END,
    ),
    START,
    END,
    bare=True,
)
QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    models="Qwen3-Coder, Qwen 3.5, Nemotron 3 Nano, Step-3.5-Flash",
    read=CALLS.read,
    write_grammar=CALLS.write_grammar,
    markers=(START, END),
    aliases=("qwen3_xml", "step3p5"),
    template_marks=("<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1",),
)

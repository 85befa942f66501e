"""MiMo-V2: the tags of Qwen3-Coder, but values stand between them as they are, without line breaks around them."""

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
        special=(START, END),
        outer_end=END,
    ),
    START,
    END,
)
MIMO = ToolFormat(
    name="mimo",
    models="MiMo-V2-Flash, MiMo-V2.5 (MiMo-7B and MiMo-VL write hermes)",
    read=CALLS.read,
    write_grammar=CALLS.write_grammar,
    markers=(START, END),
    template_marks=("<parameter=example_parameter_1>value_1</parameter>",),
)

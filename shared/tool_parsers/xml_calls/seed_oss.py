"""Seed-OSS: <seed:tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></seed:tool_call>.

Values stand between their tags as they are, without line breaks around them.
"""

from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.xml_calls.tagged_call import TaggedCall, TaggedCalls

START, END = "<seed:tool_call>", "</seed:tool_call>"
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
SEED_OSS = ToolFormat(
    name="seed_oss",
    models="Seed-OSS",
    read=CALLS.read,
    write_grammar=CALLS.write_grammar,
    markers=(START, END),
    template_marks=(START, "<parameter=example_parameter_1>value_1</parameter>"),
)

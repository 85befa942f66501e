"""GLM: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>.

GLM-4.5, GLM-4.6 and Laguna XS put line breaks between the tags, GLM-4.7 and later Laguna models do not. Both forms are
read alike. The template of Laguna XS writes earlier calls so, but asks for {"name": ..., "arguments": {...}} between
<tool_call> and </tool_call>, which is read too.
"""

from dataclasses import replace

from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.xml_calls.json_or_tags import either_reader
from blockyard.shared.tool_parsers.xml_calls.tagged_call import TaggedCall, TaggedCalls

MARKERS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
CALL = TaggedCall(
    start="<tool_call>",
    name_end="",
    end="</tool_call>",
    key="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    special=MARKERS,
)
IN_LINES = TaggedCalls(CALL)
IN_ONE_LINE = TaggedCalls(replace(CALL, line_break=""), between="")

GLM45 = ToolFormat(
    name="glm45",
    models="GLM-4.5, GLM-4.6, Laguna",
    read=either_reader(IN_LINES),
    write_grammar=IN_LINES.write_grammar,
    markers=MARKERS,
    aliases=("poolside_v1",),
    template_marks=("<arg_key>", "<arg_value>"),
)
GLM47 = ToolFormat(
    name="glm47",
    models="GLM-4.7, GLM-5",
    read=either_reader(IN_ONE_LINE),
    write_grammar=IN_ONE_LINE.write_grammar,
    markers=MARKERS,
    template_marks=("</arg_key><arg_value>{arg-value-1}",),
)

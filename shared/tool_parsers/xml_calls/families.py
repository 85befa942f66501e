"""The families whose calls are tags that `tagged_call` reads: one table of tags each.

GLM-4.5, GLM-4.6 and Laguna XS put line breaks between the tags, GLM-4.7 and later Laguna models do not. Both forms are
read alike. The template of Laguna XS writes earlier calls so, but asks for {"name": ..., "arguments": {...}} between
<tool_call> and </tool_call>, which is read too.
"""

from dataclasses import replace

from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.xml_calls.json_or_tags import either_reader
from blockyard.shared.tool_parsers.xml_calls.tagged_call import TaggedCall, TaggedCalls

DSML = "｜DSML｜"
GLM_MARKERS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
# values of these two stand between their tags as they are, without line breaks around them
_FUNCTION = TaggedCall("<function=", ">", "</function>", "<parameter=", ">", "</parameter>")
_INVOKE = TaggedCall('<invoke name="', '">', "</invoke>", '<parameter name="', '">', "</parameter>")
# a string with <, & or line breaks stands between the quotes, other values as they are
_NAMED_FUNCTION = TaggedCall(
    start='<function name="',
    name_end='">',
    end="</function>",
    key='<param name="',
    key_end='">',
    value_end="</param>",
    quotes=("<![CDATA[", "]]>"),
    line_break="",
)
# an argument is a tag such as <｜DSML｜parameter name="KEY" string="true">; "false" says that the value is JSON
_DSML_INVOKE = TaggedCall(
    start=f'<{DSML}invoke name="',
    name_end='">',
    end=f"</{DSML}invoke>",
    key=f'<{DSML}parameter name="',
    key_end='"',
    value_end=f"</{DSML}parameter>",
    says_string=True,
    special=(DSML,),
)
_GLM = TaggedCall(
    start="<tool_call>",
    name_end="",
    end="</tool_call>",
    key="<arg_key>",
    key_end="</arg_key>",
    value_end="</arg_value>",
    value="<arg_value>",
    special=GLM_MARKERS,
)


def _between(call: TaggedCall, tag: str, bare: bool = False, all_together: bool = False) -> TaggedCalls:
    """Each call, or all of them together, between <tag> and </tag>, which are special tokens."""
    start, end = f"<{tag}>", f"</{tag}>"
    special = call.special or (start, end)
    return TaggedCalls(replace(call, special=special, outer_end=end), start, end, bare, all_together)


def _family(
    name: str,
    models: str,
    calls: TaggedCalls,
    template_marks: tuple[str, ...],
    aliases: tuple[str, ...] = (),
    opens_with_marker: bool = True,  # calls begin with the first marker
    may_be_json: bool = False,  # the object of a call may stand in place of its tags
) -> ToolFormat:
    return ToolFormat(
        name=name,
        models=models,
        read=either_reader(calls) if may_be_json else calls.read,
        write_grammar=calls.write_grammar,
        markers=calls.call.special,
        aliases=aliases,
        openings=None if opens_with_marker else lambda tools: calls.starts,
        template_marks=template_marks,
    )


QWEN3_CODER = _family(
    "qwen3_coder",
    "Qwen3-Coder, Qwen 3.5, Nemotron 3 Nano, Step-3.5-Flash",
    # a line break on either side of a value belongs to the tags; some answers leave <tool_call> out
    _between(replace(_FUNCTION, padding="\n"), "tool_call", bare=True),
    ("<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1",),
    aliases=("qwen3_xml", "step3p5"),
)
MIMO = _family(
    "mimo",
    "MiMo-V2-Flash, MiMo-V2.5 (MiMo-7B and MiMo-VL write hermes)",
    _between(_FUNCTION, "tool_call"),
    ("<parameter=example_parameter_1>value_1</parameter>",),
)
SEED_OSS = _family(
    "seed_oss",
    "Seed-OSS",
    _between(_FUNCTION, "seed:tool_call"),
    ("<seed:tool_call>", "<parameter=example_parameter_1>value_1</parameter>"),
)
MINIMAX_M2 = _family(
    "minimax_m2",
    "MiniMax-M2, M2.1, M2.5",
    _between(_INVOKE, "minimax:tool_call", all_together=True),
    ("<minimax:tool_call>", '<invoke name="'),
)
MINICPM5 = _family(
    "minicpm5",
    "MiniCPM5",
    TaggedCalls(_NAMED_FUNCTION),
    ('<function name="', '<param name="'),
    opens_with_marker=False,
)
DEEPSEEK_V32 = _family(
    "deepseek_v32",
    "DeepSeek-V3.2",
    _between(_DSML_INVOKE, f"{DSML}function_calls", all_together=True),
    ("DSML", "function_calls>"),
    opens_with_marker=False,
)
DEEPSEEK_V4 = _family(
    "deepseek_v4",
    "DeepSeek-V4",
    _between(_DSML_INVOKE, f"{DSML}tool_calls", all_together=True),
    ("DSML", "tool_calls>"),
    opens_with_marker=False,
)
GLM45 = _family(
    "glm45",
    "GLM-4.5, GLM-4.6, Laguna",
    TaggedCalls(_GLM),
    ("<arg_key>", "<arg_value>"),
    aliases=("poolside_v1",),
    may_be_json=True,
)
GLM47 = _family(
    "glm47",
    "GLM-4.7, GLM-5",
    TaggedCalls(replace(_GLM, line_break=""), between=""),
    ("</arg_key><arg_value>{arg-value-1}",),
    may_be_json=True,
)

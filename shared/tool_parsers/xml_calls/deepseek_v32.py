"""DeepSeek-V3.2 and V4: tags with the token ｜DSML｜ in their names, in one block for all calls of an answer.

A call is <｜DSML｜invoke name="NAME">. An argument is a tag of its own, such as
<｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>, where string="false" says that the value is JSON.
The two versions name the block differently.
"""

from dataclasses import replace

from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.xml_calls.tagged_call import TaggedCall, TaggedCalls

TOKEN = "｜DSML｜"
CALL = TaggedCall(
    start=f'<{TOKEN}invoke name="',
    name_end='">',
    end=f"</{TOKEN}invoke>",
    key=f'<{TOKEN}parameter name="',
    key_end='"',
    value_end=f"</{TOKEN}parameter>",
    says_string=True,
    special=(TOKEN,),
)


def _calls(block: str) -> TaggedCalls:
    end = f"</{TOKEN}{block}>"
    return TaggedCalls(replace(CALL, outer_end=end), f"<{TOKEN}{block}>", end, all_together=True)


V32, V4 = _calls("function_calls"), _calls("tool_calls")
DEEPSEEK_V32 = ToolFormat(
    name="deepseek_v32",
    models="DeepSeek-V3.2",
    read=V32.read,
    write_grammar=V32.write_grammar,
    markers=(TOKEN,),
    openings=lambda tools: (V32.start,),
    template_marks=("DSML", "function_calls>"),
)
DEEPSEEK_V4 = ToolFormat(
    name="deepseek_v4",
    models="DeepSeek-V4",
    read=V4.read,
    write_grammar=V4.write_grammar,
    markers=(TOKEN,),
    openings=lambda tools: (V4.start,),
    template_marks=("DSML", "tool_calls>"),
)

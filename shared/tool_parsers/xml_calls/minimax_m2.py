"""MiniMax-M2: <minimax:tool_call> and </minimax:tool_call> around all calls of an answer.

A call is <invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>. Values stand as they are.
"""

from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.xml_calls.tagged_call import TaggedCall, TaggedCalls

START, END = "<minimax:tool_call>", "</minimax:tool_call>"
CALLS = TaggedCalls(
    TaggedCall(
        start='<invoke name="',
        name_end='">',
        end="</invoke>",
        key='<parameter name="',
        key_end='">',
        value_end="</parameter>",
        special=(START, END),
        outer_end=END,
    ),
    START,
    END,
    all_together=True,
)
MINIMAX_M2 = ToolFormat(
    name="minimax_m2",
    models="MiniMax-M2, M2.1, M2.5",
    read=CALLS.read,
    write_grammar=CALLS.write_grammar,
    markers=(START, END),
    template_marks=(START, '<invoke name="'),
)

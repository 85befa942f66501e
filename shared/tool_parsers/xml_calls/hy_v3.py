"""Hy3: <tool_calls:opensource>, then NAME, keys and values in tags of each call. In the preview without ":opensource".

A call is <tool_call>NAME<tool_sep><arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>, in lines. Values
stand as they are.
"""

from collections.abc import Sequence

from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import PartKind, Reading
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.tools import Tool
from blockyard.shared.tool_parsers.xml_calls.tagged_call import TaggedCall, TaggedCalls

NAMES = ("tool_calls", "tool_call", "arg_key", "arg_value")


def _markers(suffix: str) -> tuple[str, ...]:
    pairs = (tag for name in NAMES for tag in (f"<{name}{suffix}>", f"</{name}{suffix}>"))
    return (*pairs, f"<tool_sep{suffix}>")


def _calls(suffix: str) -> TaggedCalls:
    return TaggedCalls(
        TaggedCall(
            start=f"<tool_call{suffix}>",
            name_end=f"<tool_sep{suffix}>",
            end=f"</tool_call{suffix}>",
            key=f"<arg_key{suffix}>",
            key_end=f"</arg_key{suffix}>",
            value=f"<arg_value{suffix}>",
            value_end=f"</arg_value{suffix}>",
            special=_markers(suffix),
            outer_end=f"</tool_calls{suffix}>",
        ),
        f"<tool_calls{suffix}>",
        f"</tool_calls{suffix}>",
        all_together=True,
    )


RELEASE, PREVIEW = _calls(":opensource"), _calls("")
STARTS = Markers(RELEASE.start, PREVIEW.start)


def read(text: TextInput, tools: Sequence[Tool]) -> Reading[None]:
    while found := (yield from text.until(PartKind.CONTENT, STARTS)):
        yield from (RELEASE if found == RELEASE.start else PREVIEW).read_opened(text, tools, found)


HY_V3 = ToolFormat(
    name="hy_v3",
    models="Hy3, Hy3-preview",
    read=read,
    write_grammar=RELEASE.write_grammar,
    markers=(*_markers(":opensource"), *_markers("")),
    template_marks=("<tool_calls", "<tool_sep", "<arg_key"),
)

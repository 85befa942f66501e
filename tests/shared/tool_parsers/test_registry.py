from collections import Counter

import pytest

from blockyard.shared.parser_plugins import format_of_template
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.registry import FORMATS, NOT_BUILT

MARKED = [one for one in FORMATS if one.template_marks]


def test_each_name_is_that_of_one_format() -> None:
    names = Counter(name for one in FORMATS for name in (one.name, *one.aliases))
    assert [name for name, count in names.items() if count > 1 or name in NOT_BUILT] == []


@pytest.mark.parametrize("tool_format", MARKED, ids=lambda one: one.name)
def test_a_template_with_the_marks_of_a_format_has_that_format(tool_format: ToolFormat) -> None:
    """The more special of two formats comes first."""
    assert format_of_template("\n".join(tool_format.template_marks), FORMATS) is tool_format

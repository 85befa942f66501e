"""Files of users that define formats: the documented one works, others end the start with one line."""

from pathlib import Path

import pytest
from recorded_answers import TOOLS, call, content, reasoning, tool_reader

from blockyard.shared.errors import ConfigError
from blockyard.shared.output_parsing.reader import read_all
from blockyard.shared.parser_plugins import reasoning_format, tool_format
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules
from blockyard.shared.tool_parsers.json_calls.families import HERMES

FAMILIES = Path(__file__).parents[2] / "shared/tool_parsers/FAMILIES.md"
OWN = """
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.json_calls import families
read, write_grammar = families.HERMES.read, families.HERMES.write_grammar
"""


@pytest.fixture
def documented(tmp_path: Path) -> str:
    """The file that the document shows."""
    path = tmp_path / "documented.py"
    path.write_text(FAMILIES.read_text("utf-8").partition("```python\n")[2].partition("```")[0])
    return str(path)


def test_the_documented_file_reads_calls_and_reasoning(documented: str) -> None:
    format_ = tool_format("brackets", documented)
    text = 'So: [[get_weather {"city": "a ]] b"}]] and [[1]], [[nothing {"a": 1}]].[[get_time {}]]'
    assert read_all(tool_reader(format_), text) == [
        *content("So: "),
        *call("get_weather", '{"city": "a ]] b"}'),
        *content(' and [[1]], [[nothing {"a": 1}]].'),
        *call("get_time", "{}"),
    ]
    notes = reasoning_format("notes", documented)
    assert read_all(lambda text: notes.read(text, None), "<note>a</note>") == [*reasoning("a")]
    rules = GrammarRules()
    assert "get_weather" in rules.source(format_.write_grammar(rules, TOOLS, True))


def test_known_names_stay_known_beside_a_plugin(documented: str) -> None:
    assert tool_format("hermes", documented) is HERMES
    assert reasoning_format("qwen3", documented).name == "qwen3"
    with pytest.raises(ConfigError, match=r"--tool-call-parser x: known are .*brackets, .*hermes"):
        tool_format("x", documented)
    with pytest.raises(ConfigError, match=r"--reasoning-parser x: known are deepseek_r1, .*notes"):
        reasoning_format("x", documented)


def test_a_plugin_may_replace_a_known_format(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN + 'A = ToolFormat(name="hermes", models="ours", read=read, write_grammar=write_grammar)')
    assert tool_format("hermes", str(path)).models == "ours"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_module", "does not import: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def (", "does not import: SyntaxError: "),
        ("raise SystemExit('bye\\nbye')", "does not import: SystemExit: bye bye"),
        ("x = 1", "has no variable that is a ToolFormat"),
        (OWN + 'A = ToolFormat("", "ours", read, write_grammar)', "the ToolFormat '' is not whole"),
        (OWN + 'A = ToolFormat("a", "ours", read, None)', "the ToolFormat 'a' is not whole"),
        (OWN + 'A = ToolFormat("auto", "ours", read, write_grammar)', "the ToolFormat 'auto' is not whole, or has no"),
        (
            OWN + "A, B = (ToolFormat('a', m, read, write_grammar) for m in '12')",
            "two formats have the name 'a'",
        ),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, source: str, said: str) -> None:
    path = tmp_path / "own.py"
    path.write_text(source)
    with pytest.raises(ConfigError) as refusal:
        tool_format("hermes", str(path))
    assert str(refusal.value).startswith(f"--tool-parser-plugin {path}: {said}")
    assert "\n" not in str(refusal.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("x = 1")
    with pytest.raises(ConfigError, match="not a Python file"):
        tool_format("a", str(tmp_path / "own.txt"))
    with pytest.raises(ConfigError, match="no such file"):
        tool_format("a", str(tmp_path))

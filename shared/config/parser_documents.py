"""The tables of shared/tool_parsers/FAMILIES.md: formats of tool calls and of reasoning, from their declarations."""

from blockyard.shared.config.flags.documents import DocumentTables
from blockyard.shared.reasoning_parsers import registry as reasoning_parsers
from blockyard.shared.tool_parsers import registry as tool_parsers


def markdown() -> str:
    """Returns the tables, one row for each format."""
    tools = ["| `--tool-call-parser` | models | `auto` |", "|---|---|---|"]
    for format_ in tool_parsers.FORMATS:
        names = _names(format_.name, format_.aliases)
        tools.append(f"| {names} | {_cell(format_.models)} | {_auto(format_.template_marks)} |")
    tools += [f"| `{name}` | not built: {_cell(why)} | |" for name, why in sorted(tool_parsers.NOT_BUILT.items())]
    reasoning = ["| `--reasoning-parser` | models | from, to | `auto` |", "|---|---|---|---|"]
    for one in reasoning_parsers.FORMATS:
        markers = ", ".join(f"`{_cell(marker)}`" for marker in (one.start, one.end) if marker)
        reasoning.append(
            f"| {_names(one.name, one.aliases)} | {_cell(one.models)} | {markers} | {_auto(one.template_marks)} |"
        )
    return "\n".join([*tools, "", *reasoning])


def _names(name: str, aliases: tuple[str, ...]) -> str:
    return ", ".join(f"`{one}`" for one in (name, *aliases))


def _auto(marks: tuple[str, ...]) -> str:
    return "yes" if marks else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "\\n")


TABLES = DocumentTables("formats", "blockyard parsers --write shared/tool_parsers/FAMILIES.md", markdown)

"""Documents the flags: help text for the terminal, and the table in shared/config/FLAGS.md."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blockyard.shared.config.flags import GROUPS, vllm_only
from blockyard.shared.config.flags.flag import Flag, FlagKind
from blockyard.shared.errors import ConfigError

BEGIN = "<!-- flags: written by `blockyard flags --write shared/config/FLAGS.md` -->"
END = "<!-- end of flags -->"
BEGIN_OF_VLLM = "<!-- flags of vLLM alone: written by the same command -->"
END_OF_VLLM = "<!-- end of the flags of vLLM alone -->"
_SAID_AS = {"honoured": "", "mapped": "mapped: ", "refused": "refused: "}


def help_text(show_refused: bool = False) -> str:
    """Returns the help of all flags by group; without `show_refused` only of flags that have an effect."""
    lines: list[str] = []
    for group, flags in (GROUPS | vllm_only.GROUPS).items():
        shown = [flag for flag in flags if show_refused or not flag.refused]
        if not shown:
            continue
        lines += ["", f"{group}:"]
        for flag in shown:
            lines.append(f"  {spelling(flag)}")
            lines += textwrap.wrap(_terminal_words(flag), 110, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines[1:])


def markdown(groups: Mapping[str, tuple[Flag, ...]] = GROUPS) -> str:
    """Returns the table with one row per flag."""
    rows = ["| flag | default | what it does |", "|---|---|---|"]
    for group, flags in groups.items():
        rows.append(f"| **{group}** | | |")
        rows += [f"| {_names(flag)} | {_default(flag)} | {_cell(flag)} |" for flag in flags]
    every = [flag for flags in groups.values() for flag in flags]
    counts = {status: sum(flag.status == status for flag in every) for status in _SAID_AS}
    summary = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    return f"{len(every)} flags: {summary}.\n\n" + "\n".join(rows)


def with_table(document: str) -> str:
    """Returns the document with the current tables between their marker comments. Raises ConfigError without them."""
    document = with_section(document, BEGIN, END, markdown())
    return with_section(document, BEGIN_OF_VLLM, END_OF_VLLM, markdown(vllm_only.GROUPS))


def with_section(document: str, begin: str, end: str, text: str) -> str:
    """Returns the document with `text` between the lines `begin` and `end`. Raises ConfigError without them."""
    head, has_begin, rest = document.partition(begin)
    _, has_end, tail = rest.partition(end)
    if not has_begin or not has_end:
        raise ConfigError(f"the document has no lines {begin!r} and {end!r}")
    return f"{head}{begin}\n\n{text}\n\n{end}{tail}"


def rewrite(path: Path, change: Callable[[str], str]) -> None:
    """Changes the text of a document. Raises ConfigError if it cannot be read or written."""
    try:
        path.write_text(change(path.read_text("utf-8")), "utf-8")
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from e


@dataclass(frozen=True, slots=True)
class DocumentTables:
    """Tables that stand between two marker comments of a document, and the command that prints and writes them."""

    of: str  # what, in the comments
    written_by: str  # the command with its words
    markdown: Callable[[], str]  # the current tables

    def written_in(self, document: str) -> str:
        """Returns the document with the current tables. Raises ConfigError without the marker comments."""
        return with_section(
            document,
            f"<!-- {self.of}: written by `{self.written_by}` -->",
            f"<!-- end of {self.of} -->",
            self.markdown(),
        )

    def command(self, args: Sequence[str]) -> int:
        """Prints the tables; `--write FILE` updates them in a document. Raises ConfigError."""
        match list(args):
            case []:
                print(self.markdown())
            case ["--write", name]:
                rewrite(Path(name), self.written_in)
            case _:
                raise ConfigError("expected nothing, or --write FILE")
        return 0


def spelling(flag: Flag) -> str:
    """Returns the spellings, such as `-tp, --tensor-parallel-size integer`."""
    names = ", ".join([*_short_names(flag), *_long_names(flag)])
    if flag.kind is FlagKind.BOOL:
        return names if not flag.default else f"{names}, --no-{flag.name}"
    return f"{names} {{{','.join(flag.choices)}}}" if flag.choices else f"{names} {flag.kind.partition(',')[0]}"


def _terminal_words(flag: Flag) -> str:
    said = flag.help
    if flag.kind is not FlagKind.BOOL and flag.default not in (None, [], ""):
        said += f" Default: {_plain(flag.default)}."
    if flag.mapped or flag.refused:
        said += f" {_SAID_AS[flag.status]}{flag.mapped or flag.refused}."
    return said


def _names(flag: Flag) -> str:
    return ", ".join(f"`{name}`" for name in (*_long_names(flag), *_short_names(flag)))


def _long_names(flag: Flag) -> list[str]:
    return [f"--{name}" for name in (flag.name, *flag.other_names)]


def _short_names(flag: Flag) -> list[str]:
    return [f"-{name}" for name in flag.short_names]


def _default(flag: Flag) -> str:
    if flag.kind is FlagKind.BOOL:
        return "on" if flag.default else "off"
    return "" if flag.default in (None, [], "") else f"`{_plain(flag.default)}`"


def _plain(value: object) -> str:
    if isinstance(value, list):
        return " ".join(str(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cell(flag: Flag) -> str:
    said = flag.help
    if flag.choices:
        said += f" One of {', '.join(flag.choices)}."
    if flag.mapped or flag.refused:
        said += f" *{_SAID_AS[flag.status].strip()}* {flag.mapped or flag.refused}."
    reasons: dict[str, list[str]] = {}
    for choice, reason in flag.refused_values.items():
        reasons.setdefault(reason, []).append(choice)
    for reason, choices in reasons.items():
        if reason != flag.refused:
            said += f" *refused:* {', '.join(choices)} ({reason})."
    return said.replace("|", "\\|")

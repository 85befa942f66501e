"""`blockyard flags`: every flag, for the terminal or as README's table."""

from collections.abc import Sequence
from pathlib import Path

from blockyard.shared.config import table
from blockyard.shared.errors import ConfigError


def help_text() -> str:
    """The flags that do something, for `--help`."""
    return table.help_text()


def main(args: Sequence[str]) -> int:
    """`--markdown` prints the table, `--write FILE` brings the one in a document up to date. Raises ConfigError."""
    match list(args):
        case []:
            print(table.help_text(show_refused=True))
        case ["--markdown"]:
            print(table.markdown())
        case ["--write", name]:
            path = Path(name)
            try:
                path.write_text(table.with_table(path.read_text("utf-8")), "utf-8")
            except OSError as e:
                raise ConfigError(f"{path}: {e.strerror}") from e
        case _:
            raise ConfigError("expected nothing, --markdown, or --write FILE")
    return 0

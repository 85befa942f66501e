"""Keys of clients and operators: from flags, and from files that may name the tenant of each key."""

import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.errors import ConfigError

_NAME = re.compile(r"[\w.@-]{1,64}")
_RESERVED = re.compile(r"admin|key-\d+")  # tenants that are no names


class AccessKey(NamedTuple):
    key: str
    tenant: str  # in metrics, logs and the fair policy


def flag_keys(values: Values, name: str) -> list[str]:
    """Returns the keys of a flag. Raises ConfigError for one that is empty or not UTF-8."""
    keys = [key.strip() for key in values.get(name, list)]
    if values.is_given(name) and not (keys and all(keys)):
        raise ConfigError(f"{values.where(name)}: an empty key would let everyone in")
    try:
        "".join(keys).encode()
    except UnicodeEncodeError as e:
        raise ConfigError(f"{values.where(name)}: a key is not UTF-8") from e
    return keys


def all_keys(keys: Sequence[str], file: str, where: str) -> list[AccessKey]:
    """Returns the keys of a flag, then those of a file, if there is one. A key without a name has its place as tenant.

    Raises ConfigError, which begins with `where`, if the file cannot be used.
    """
    lines = [("", key) for key in keys] + (_lines(file, where) if file else [])
    return [AccessKey(key, name or f"key-{place}") for place, (name, key) in enumerate(lines)]


def key_file(values: Values, name: str) -> str:
    """Returns the absolute path of the file that a flag names; empty: none. Raises ConfigError if it cannot be used."""
    file = values.maybe(name, str)
    if file is None:
        return ""
    _lines(file, f"{values.where(name)} {file}")
    return str(Path(file).absolute())


def _lines(file: str, where: str) -> list[tuple[str, str]]:
    """The name, which may be empty, and the key of each line. Messages never contain a key."""
    path = Path(file)
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for, and is empty at a second reading
            raise ConfigError(f"{where}: is no regular file")
        text = path.read_text("utf-8")
    except OSError as e:
        raise ConfigError(f"{where}: {e.strerror}") from e
    except ValueError as e:
        raise ConfigError(f"{where}: is not UTF-8") from e
    found: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words:
            continue
        name = words[0] if len(words) == 2 else ""
        if len(words) > 2:
            raise ConfigError(f"{where}: line {number} has {len(words)} words; KEY or NAME KEY is expected")
        if name and (not _NAME.fullmatch(name) or _RESERVED.fullmatch(name)):
            raise ConfigError(
                f"{where}: line {number}: a name has up to 64 letters, digits and .@-_, and is not admin or key-N"
            )
        found.append((name, words[-1]))
    if not found:
        raise ConfigError(f"{where}: holds no key; one on each line is expected")
    if len({key for _, key in found}) < len(found):
        raise ConfigError(f"{where}: has one key twice")
    return found

"""The keys that clients and operators have to present: from flags, and from files with one key a line."""

from pathlib import Path

from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.errors import ConfigError


def read(values: Values, name: str, file_name: str) -> list[str]:
    """The keys of two flags, the second of which names a file. Raises ConfigError if one is given and holds none."""
    keys = [key.strip() for key in values.get(name, list)]
    if values.is_given(name) and not (keys and all(keys)):
        raise ConfigError(f"{values.where(name)}: an empty key would let everyone in")
    file = values.maybe(file_name, str)
    if file is not None:
        keys += _lines(file, values.where(file_name))
    try:
        "".join(keys).encode()
    except UnicodeEncodeError as e:
        raise ConfigError(f"{values.where(name)}: a key is not UTF-8") from e
    return keys


def _lines(file: str, where: str) -> list[str]:
    try:
        text = Path(file).read_text("utf-8")
    except OSError as e:
        raise ConfigError(f"{where} {file}: {e.strerror}") from e
    except ValueError as e:
        raise ConfigError(f"{where} {file}: is not UTF-8") from e
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys:
        raise ConfigError(f"{where} {file}: holds no key; one on each line is expected")
    return keys

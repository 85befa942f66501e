"""How processes log: --log-level, --log-config-file and vLLM's --logging-config."""

from pathlib import Path

import msgspec

from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.errors import ConfigError
from blockyard.shared.json_objects import read_json

FLAG, FILE_FLAG, LEVEL_FLAG = "logging-config", "log-config-file", "log-level"


class LoggingKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of --logging-config."""

    level: str = ""  # as --log-level
    pylogging_config_file: str = ""  # as --log-config-file


def log_level(values: Values) -> str:
    """Returns the level of processes. Raises ConfigError."""
    return _one_of(values, LEVEL_FLAG, values.get(LEVEL_FLAG, str), _keys(values).level.lower(), "level")


def config_file(values: Values) -> str:
    """Returns the absolute path of the file for `logging.config.dictConfig`; empty: none. Raises ConfigError."""
    name = _one_of(
        values, FILE_FLAG, values.maybe(FILE_FLAG, str) or "", _keys(values).pylogging_config_file, "its file"
    )
    if not name:
        return ""
    path = Path(name).expanduser().absolute()
    read_json(path)
    return str(path)


def _keys(values: Values) -> LoggingKeys:
    try:
        return msgspec.convert(values.get(FLAG, dict), LoggingKeys)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{values.where(FLAG)}: {e}") from e


def _one_of(values: Values, flag: str, of_flag: str, of_key: str, what: str) -> str:
    if of_key and values.is_given(flag) and of_key != of_flag:
        raise ConfigError(f"{values.where(FLAG)} and {values.where(flag)} disagree about {what}")
    return of_key or of_flag

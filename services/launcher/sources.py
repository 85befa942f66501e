"""Reads flags from the command line, BLOCKYARD_* variables and the YAML file of --config."""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import yaml

from blockyard.shared.config import parsed_flags
from blockyard.shared.config.parsed_flags import ParsedFlag, ParsedFlags, Values
from blockyard.shared.errors import ConfigError


def read(args: Sequence[str], environ: Mapping[str, str]) -> tuple[Values, list[str], list[str]]:
    """Returns (values, positional arguments, notes). Raises ConfigError, also for refused values."""
    line, positionals = parsed_flags.from_command_line(args)
    values, notes = combine(line, environ)
    return values, positionals, notes


def with_model(values: Values, model: str) -> Values:
    """Returns the flags with a positional argument as the model, which has precedence over the environment and a file.

    Raises ConfigError if a flag of the command line names another one.
    """
    if values.where("model").startswith("-") and values.is_given("model") and values["model"] != model:
        raise ConfigError(f"model {model} and {values.where('model')} {values['model']}: which one?")
    return values.with_given({"model": ParsedFlag(model, "model")})


def combine(
    given: ParsedFlags, environ: Mapping[str, str], known: Container[str] | None = None
) -> tuple[Values, list[str]]:
    """Adds flags of the environment and the --config file to `given`; with `known` only these. Raises ConfigError."""
    environment, notes = parsed_flags.from_environment(environ)
    path = (given.get("config") or environment.get("config") or ParsedFlag(None, "")).value
    file = read_yaml(Path(path)) if isinstance(path, str) else {}
    if known is not None:
        environment, file = ({k: v for k, v in flags.items() if k in known} for flags in (environment, file))
    return Values(given, environment, file), notes


def read_yaml(path: Path) -> ParsedFlags:
    """Reads the flags of a YAML file, a mapping of names to values. Raises ConfigError."""
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except OSError as e:
        raise ConfigError(f"--config {path}: {e.strerror}") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(e).split())}") from e
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: expected a mapping of flags to values")
    if "config" in content:
        raise ConfigError(f"--config {path}: a config file cannot name another one")
    return parsed_flags.from_mapping(content, path.name)

"""The keyword arguments of `LLM`: the flags of `blockyard serve`, without those of its HTTP server."""

import os
from collections.abc import Mapping
from pathlib import Path

from blockyard.services.launcher.models import model_files
from blockyard.services.launcher.sources import read_yaml
from blockyard.shared.config import parsed_flags
from blockyard.shared.config.flags import FLAGS, GROUPS
from blockyard.shared.config.parsed_flags import ParsedFlag, ParsedFlags, Values
from blockyard.shared.config.resolve import memory_notes
from blockyard.shared.errors import ConfigError

SOURCE = "LLM"  # begins each error
ALSO_OFFLINE = (
    "chat-template",
    "served-model-name",
    "trust-remote-code",
    "allowed-local-media-path",
    "chat-template-content-format",
)
SERVER_ONLY = {flag.name for group in ("HTTP server", "Security") for flag in GROUPS[group]} - {*ALSO_OFFLINE} | {
    "api-gateways",
    "enable-log-requests",
    "metrics-port",
    "metrics-names",
    "client-timeout",
    "max-body-bytes",
    "shutdown-timeout",
    "message-bus",
    "bind",
    "advertise",
    "curve-keys",
    "name",
}


def read(
    model: str | os.PathLike[str] | None, arguments: Mapping[str, object], environ: Mapping[str, str]
) -> tuple[Values, list[str]]:
    """The flags' values and notes to tell. Arguments come before BLOCKYARD_* and the file that `config` names; an
    argument that is None is not given.

    Raises ConfigError with a line for each that is unknown or refused. What the environment or the file say of
    the HTTP server is left alone: it is said to `serve`.
    """
    plain: dict[object, object] = {key: _plain(value) for key, value in arguments.items()}
    if model is not None:
        plain["model"] = os.fspath(model)
    spoken = parsed_flags.from_mapping(plain, SOURCE)
    for name, one in spoken.items():
        if name in SERVER_ONLY:
            raise ConfigError(f"{one.where}: is for `blockyard serve` and `run`; the offline API has no HTTP server")
    unsaid = {str(key).replace("_", "-") for key, value in plain.items() if value is None}
    spoken = {name: one for name, one in spoken.items() if name not in unsaid}
    environment, notes = parsed_flags.from_environment(environ)
    path = (spoken.get("config") or environment.get("config") or ParsedFlag(None, "")).value
    file = read_yaml(Path(path)) if isinstance(path, str) else {}
    values = Values(spoken, _without_server(environment), _without_server(file))
    if not values.is_given("model") and values["worker-cls"] == "mock":
        values = values.with_given({"model": ParsedFlag(model_files.DEMO, "model")})
    return values, [*notes, *values.notes(), *memory_notes(values)]


def _plain(value: object) -> object:
    """Paths and torch's types as the command line has them."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    named = str(value)
    return named.removeprefix("torch.") if type(value).__name__ == "dtype" and named.startswith("torch.") else value


def _without_server(flags: ParsedFlags) -> ParsedFlags:
    return {name: one for name, one in flags.items() if name not in SERVER_ONLY and name in FLAGS}

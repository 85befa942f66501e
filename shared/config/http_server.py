"""Settings of the HTTP server that follow from several flags: access keys, TLS, log lines, the socket."""

import os
from pathlib import Path
from typing import Any

from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.errors import ConfigError

MAX_SOCKET_PATH = 107  # bytes, the kernel's limit


def read_keys(values: Values, name: str, file_name: str) -> list[str]:
    """Returns the keys of two flags; the second names a file, one key a line. Raises ConfigError for an empty one."""
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


def tls_fields(values: Values, tls: dict[str, Any]) -> dict[str, Any]:
    """Returns GatewayConfig.tls as a field, or nothing without TLS flags. Raises ConfigError."""
    if tls.get("keyfile") and not tls.get("certfile"):
        raise ConfigError(f"{values.where('ssl-keyfile')}: needs --ssl-certfile")
    if not tls.get("certfile"):
        if values.is_given("ssl-ca-certs") or values["ssl-cert-reqs"]:
            raise ConfigError(f"{values.where('ssl-ca-certs')}: needs --ssl-certfile")
        return {}
    for name in ("ssl-keyfile", "ssl-certfile", "ssl-ca-certs"):
        path = values.maybe(name, str)
        if path is not None and not os.path.isfile(path):
            raise ConfigError(f"{values.where(name)} {path}: no such file")
    more = {"ca_certs": values.maybe("ssl-ca-certs", str) or "", "cert_reqs": values.get("ssl-cert-reqs", int)}
    return {"tls": tls | more}


def log_fields(values: Values) -> dict[str, bool]:
    """Raises ConfigError."""
    disabled, enabled = values.get("disable-log-requests", bool), values.get("enable-log-requests", bool)
    if disabled and enabled:
        raise ConfigError(
            f"{values.where('enable-log-requests')} and {values.where('disable-log-requests')}: give one of them"
        )
    access_log = not disabled and not values.get("disable-uvicorn-access-log", bool)
    return {"access_log": access_log, "log_requests": enabled}


def check_socket(values: Values) -> None:
    """Raises ConfigError for a --uds that cannot be bound."""
    path = values.maybe("uds", str)
    if path is None:
        return
    if values.get("api-gateways", int) > 1:
        raise ConfigError(f"{values.where('api-gateways')}: a Unix socket has one gateway, --uds is given")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(f"{values.where('uds')} {path}: longer than {MAX_SOCKET_PATH} bytes")


def notes(values: Values) -> list[str]:
    """Returns a line for --host and --port if --uds makes them ineffective."""
    if values.maybe("uds", str) is None:
        return []
    return [f"{values.where(name)}: has no effect beside --uds" for name in ("host", "port") if values.is_given(name)]

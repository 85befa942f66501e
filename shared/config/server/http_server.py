"""Settings of the HTTP server that follow from several flags: TLS, log lines, the socket."""

import os
from typing import Any

from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.errors import ConfigError

MAX_SOCKET_PATH = 107  # bytes, the kernel's limit


def tls_fields(values: Values, tls: dict[str, Any]) -> dict[str, Any]:
    """Returns GatewayConfig.tls as a field, or nothing without TLS flags. Raises ConfigError."""
    if tls.get("keyfile") and not tls.get("certfile"):
        raise ConfigError(f"{values.where('ssl-keyfile')}: needs --ssl-certfile")
    if not tls.get("certfile"):
        for name in ("ssl-ca-certs", "ssl-cert-reqs", "ssl-ciphers", "enable-ssl-refresh"):
            if values[name]:
                raise ConfigError(f"{values.where(name)}: needs --ssl-certfile")
        return {}
    for name in ("ssl-keyfile", "ssl-certfile", "ssl-ca-certs"):
        path = values.maybe(name, str)
        if path is not None and not os.path.isfile(path):
            raise ConfigError(f"{values.where(name)} {path}: no such file")
    more = {
        "ca_certs": values.maybe("ssl-ca-certs", str) or "",
        "cert_reqs": values.get("ssl-cert-reqs", int),
        "ciphers": values.maybe("ssl-ciphers", str) or "",
        "refresh": values.get("enable-ssl-refresh", bool),
    }
    return {"tls": tls | more}


def log_fields(values: Values) -> dict[str, Any]:
    """Returns which requests have a line in the log. Raises ConfigError."""
    disabled, enabled = values.get("disable-log-requests", bool), values.get("enable-log-requests", bool)
    if disabled and enabled:
        raise ConfigError(
            f"{values.where('enable-log-requests')} and {values.where('disable-log-requests')}: give one of them"
        )
    access_log = not disabled and not values.get("disable-uvicorn-access-log", bool)
    paths = [path.strip() for path in (values.maybe("disable-access-log-for-endpoints", str) or "").split(",")]
    if wrong := [path for path in paths if path and not path.startswith("/")]:
        raise ConfigError(
            f"{values.where('disable-access-log-for-endpoints')}: a path begins with /, got {wrong[0][:80]!r}"
        )
    return {"access_log": access_log, "log_requests": enabled, "unlogged_paths": [path for path in paths if path]}


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
    """Returns a line for each flag that another one makes ineffective."""
    notes = []
    if values.maybe("uds", str) is not None:
        of_port = [name for name in ("host", "port") if values.is_given(name)]
        notes += [f"{values.where(name)}: has no effect beside --uds" for name in of_port]
    if values.is_given("enable-log-deltas") and not values.get("enable-log-outputs", bool):
        notes.append(f"{values.where('enable-log-deltas')}: has no effect without --enable-log-outputs")
    if values.is_given("max-log-len") and not any(
        values.get(name, bool) for name in ("enable-log-requests", "enable-log-outputs")
    ):
        notes.append(
            f"{values.where('max-log-len')}: has no effect without --enable-log-requests or --enable-log-outputs"
        )
    return notes


def check_gateways(values: Values) -> None:
    """Raises ConfigError for several gateways beside --disable-frontend-multiprocessing, which is one."""
    if values.get("disable-frontend-multiprocessing", bool) and values.get("api-gateways", int) > 1:
        raise ConfigError(
            f"{values.where('api-gateways')}: --disable-frontend-multiprocessing is one gateway; give one of them"
        )

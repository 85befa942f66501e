"""Settings of the HTTP server that follow from several flags: TLS, its log lines, where it listens."""

import os
from typing import Any

from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.errors import ConfigError

MAX_SOCKET_PATH = 107  # bytes, as the kernel has it


def tls_fields(values: Values, tls: dict[str, Any]) -> dict[str, Any]:
    """`tls` of GatewayConfig, if there is to be one. Raises ConfigError."""
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
            f"{values.where('enable-log-requests')} and {values.where('disable-log-requests')}: which one?"
        )
    access_log = not disabled and not values.get("disable-uvicorn-access-log", bool)
    return {"access_log": access_log, "log_requests": enabled}


def check_socket(values: Values) -> None:
    """Raises ConfigError for a --uds that cannot be had."""
    path = values.maybe("uds", str)
    if path is None:
        return
    if values.get("api-gateways", int) > 1:
        raise ConfigError(f"{values.where('api-gateways')}: a Unix socket has one gateway, --uds is given")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(f"{values.where('uds')} {path}: longer than {MAX_SOCKET_PATH} bytes")


def notes(values: Values) -> list[str]:
    """A line for each of --host and --port that is given in vain."""
    if values.maybe("uds", str) is None:
        return []
    return [f"{values.where(name)}: has no effect beside --uds" for name in ("host", "port") if values.is_given(name)]

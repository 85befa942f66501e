"""The HTTP servers around a gateway, from the first listening socket to the last drained request."""

import asyncio
import errno
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from blockyard.services.api_gateway.http import connections
from blockyard.services.api_gateway.http.client_text import http_logger
from blockyard.services.api_gateway.http.connections import BoundedRunner
from blockyard.services.api_gateway.responses.error_body import ApiError
from blockyard.services.api_gateway.routes import build_app, build_metrics_app
from blockyard.services.api_gateway.service import Gateway
from blockyard.shared import open_files
from blockyard.shared.config.gateway import GatewayConfig, TlsConfig
from blockyard.shared.errors import ConfigError

log = logging.getLogger(__name__)

BACKLOG = 2048
KEEPALIVE_S = 75.0  # an idle connection is closed after it
POLL_S = 0.05
METRICS_CONNECTIONS = 64  # of --metrics-port
LAST_WORDS_S = 1.0  # for writing the error to those whom the drain has cut off
_HANDLING: dict[str, Any] = {
    "handler_cancellation": True,  # a client that leaves cancels what it waited for
    "access_log": None,
    "logger": http_logger(),
    "keepalive_timeout": KEEPALIVE_S,
    "shutdown_timeout": LAST_WORDS_S,
}


class Server:
    """Listening sockets of one gateway."""

    def __init__(self, gateway: Gateway, runners: list[web.AppRunner], timeout_s: float) -> None:
        self._gateway, self._runners, self._timeout_s = gateway, runners, timeout_s
        address = runners[0].addresses[0]  # of a Unix socket, its path
        self.port: int = 0 if isinstance(address, str) else address[1]  # the one bound, where the settings said 0

    async def drain(self) -> None:
        """No new requests; those that run have the shutdown timeout to end, then they are told."""
        self._gateway.drain()
        for runner in self._runners:
            for site in list(runner.sites):
                await site.stop()
        loop = asyncio.get_running_loop()
        until = loop.time() + self._timeout_s
        while self._gateway.num_active and loop.time() < until:
            await asyncio.sleep(POLL_S)
        if left := self._gateway.num_active:
            log.warning("%d requests did not end within %.0f s", left, self._timeout_s)
            self._gateway.flow.abandon(ApiError("The server is shutting down.", status=503, retry_after_s=1.0))
            until = loop.time() + LAST_WORDS_S
            while self._gateway.num_active and loop.time() < until:
                await asyncio.sleep(POLL_S)


@asynccontextmanager
async def listening(config: GatewayConfig, gateway: Gateway) -> AsyncIterator[Server]:
    """Binds and serves HTTP inside the block. Raises ConfigError if the port or the key files cannot be had."""
    context = None if config.tls is None else tls_context(config.tls)
    async with AsyncExitStack() as stack:
        most = connections.bound(config.max_connections, open_files.raise_limit())
        app = BoundedRunner(build_app(config, gateway), most, **_HANDLING)
        runners = [await _serve(stack, app, lambda: _site(config, app, context))]
        if config.uds:
            stack.callback(Path(config.uds).unlink, missing_ok=True)
        if config.metrics_port:
            metrics = BoundedRunner(build_metrics_app(gateway), METRICS_CONNECTIONS, **_HANDLING)
            host, port = config.host or None, config.metrics_port
            runners.append(await _serve(stack, metrics, lambda: web.TCPSite(metrics, host, port)))
        yield Server(gateway, runners, config.shutdown_timeout_s)


async def _serve(stack: AsyncExitStack, runner: web.AppRunner, make_site: Callable[[], web.BaseSite]) -> web.AppRunner:
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await _start(make_site())
    return runner


def _site(config: GatewayConfig, runner: web.AppRunner, context: ssl.SSLContext | None) -> web.BaseSite:
    """A Unix socket that an earlier process left behind is replaced."""
    if config.uds:
        return web.UnixSite(runner, config.uds, ssl_context=context, backlog=BACKLOG)
    return web.TCPSite(
        runner, config.host or None, config.port, ssl_context=context, backlog=BACKLOG, reuse_port=config.reuse_port
    )


async def _start(site: web.BaseSite) -> None:
    where = f"socket {site.name}" if isinstance(site, web.UnixSite) else f"port {site.name.rpartition(':')[2]}"
    try:
        await site.start()
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            raise ConfigError(f"{where} is in use: --port takes another") from e
        raise ConfigError(f"cannot listen on {where}: {e.strerror or e}") from e


def tls_context(tls: TlsConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # an encrypted key fails: nobody is there to type a password
        context.load_cert_chain(tls.certfile, tls.keyfile or None, password="")
        if tls.ca_certs:
            context.load_verify_locations(tls.ca_certs)
        context.verify_mode = ssl.VerifyMode(tls.cert_reqs)
    except (OSError, ValueError) as e:  # ssl.SSLError is an OSError
        key = f"--ssl-keyfile {tls.keyfile}" if tls.keyfile else "no --ssl-keyfile: the file must hold the key too"
        raise ConfigError(f"TLS: {e}; --ssl-certfile {tls.certfile}, {key}") from e
    return context

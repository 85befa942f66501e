"""The HTTP servers of a gateway: routes and middleware, listening sockets, TLS, draining."""

import asyncio
import errno
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from blockyard.services.api_gateway.endpoints.generation import GenerationEndpoints
from blockyard.services.api_gateway.endpoints.operations import OperatorEndpoints
from blockyard.services.api_gateway.endpoints.status import StatusEndpoints
from blockyard.services.api_gateway.http import connections, middleware
from blockyard.services.api_gateway.http.access import Guard
from blockyard.services.api_gateway.http.client_text import http_logger
from blockyard.services.api_gateway.http.connections import BoundedRunner
from blockyard.services.api_gateway.http.paced_site import PacedSite
from blockyard.services.api_gateway.http.request_context import IGNORED, REQUEST_ID
from blockyard.services.api_gateway.http.uploads import Uploads
from blockyard.services.api_gateway.metrics.scrape import CONTENT_TYPE
from blockyard.services.api_gateway.requests.ignored_fields import HEADER as IGNORED_HEADER
from blockyard.services.api_gateway.service import Gateway
from blockyard.shared.config.services.gateway import GatewayConfig, TlsConfig
from blockyard.shared.errors import ConfigError, RequestError
from blockyard.shared.process import open_files

log = logging.getLogger(__name__)

KEEPALIVE_S = 75.0  # idle connections are closed after this
POLL_S = 0.05
METRICS_CONNECTIONS = 64  # on --metrics-port
ABANDON_S = 1.0  # time to write the error to requests that the drain timeout ended
_HANDLING: dict[str, Any] = {
    "handler_cancellation": True,  # a client that disconnects cancels its handler
    "access_log": None,
    "auto_decompress": False,  # bodies are decoded by `Uploads`
    "logger": http_logger(),
    "keepalive_timeout": KEEPALIVE_S,
    "shutdown_timeout": ABANDON_S,
}


class HttpServer:
    """The listening sockets of one gateway."""

    def __init__(self, gateway: Gateway, runners: list[web.AppRunner], timeout_s: float) -> None:
        self._gateway, self._runners, self._timeout_s = gateway, runners, timeout_s
        address = runners[0].addresses[0]  # of a Unix socket, its path
        self.port: int = 0 if isinstance(address, str) else address[1]  # the bound port, also where the settings have 0

    async def drain(self) -> None:
        """Accepts no new requests, waits for the open ones, and fails the rest after the shutdown timeout."""
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
            self._gateway.pipeline.abandon(RequestError("The server is shutting down.", status=503, retry_after_s=1.0))
            until = loop.time() + ABANDON_S
            while self._gateway.num_active and loop.time() < until:
                await asyncio.sleep(POLL_S)


@asynccontextmanager
async def listening(config: GatewayConfig, gateway: Gateway) -> AsyncIterator[HttpServer]:
    """Binds and serves HTTP inside the block. Raises ConfigError if the port or the key files are not usable."""
    context = None if config.tls is None else tls_context(config.tls)
    async with AsyncExitStack() as stack:
        most = connections.bound(config.max_connections, open_files.raise_limit())
        app = BoundedRunner(build_app(config, gateway), most, **_HANDLING)
        runners = [await _serve(stack, app, lambda: _site(config, app, context))]
        if config.uds:
            stack.callback(Path(config.uds).unlink, missing_ok=True)
        if config.metrics_port:
            metrics = BoundedRunner(build_metrics_app(gateway), METRICS_CONNECTIONS, **_HANDLING)
            host, port = config.host, config.metrics_port
            runners.append(await _serve(stack, metrics, lambda: PacedSite.at_port(metrics, host, port)))
        yield HttpServer(gateway, runners, config.shutdown_timeout_s)


def build_app(config: GatewayConfig, gateway: Gateway) -> web.Application:
    preflights, cors_headers = middleware.cors(config.cors)
    guard = Guard(config.api_keys, config.admin_keys)
    app = web.Application(
        client_max_size=config.max_body_bytes,
        middlewares=[
            middleware.request_ids(config),
            middleware.errors(gateway, guard),
            preflights,
            middleware.authorized(guard),
            middleware.json_only(guard),
            middleware.counted(gateway, guard),
        ],
    )
    app.on_response_prepare.append(cors_headers)
    if config.enable_request_id_headers:
        app.on_response_prepare.append(_add_request_id)
    app.on_response_prepare.append(_add_ignored_fields)
    uploads = Uploads(config.max_body_bytes, config.max_total_body_bytes, config.body_timeout_s)
    endpoints = (
        GenerationEndpoints(gateway.pipeline, gateway.streams, gateway.body_parser, uploads),
        StatusEndpoints(gateway),
        OperatorEndpoints(gateway.client.controls),
    )
    root = config.root_path.strip("/")
    for prefix in dict.fromkeys(("", f"/{root}" if root else "")):  # some proxies strip their prefix, some do not
        for route in (route for each in endpoints for route in each.routes()):
            guard.add(app, route, prefix + route.path)
            if not route.path.endswith(("/", "}")):
                guard.add(app, route, f"{prefix}{route.path}/")
    return app


def build_metrics_app(gateway: Gateway) -> web.Application:
    """Serves only this gateway's counters, on --metrics-port."""

    async def own(_: web.Request) -> web.Response:
        return web.Response(body=gateway.metrics.own().encode(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.router.add_get("/metrics", own)
    return app


async def _add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Request-Id"] = REQUEST_ID.get()


async def _add_ignored_fields(request: web.Request, response: web.StreamResponse) -> None:
    if names := IGNORED.get():
        response.headers[IGNORED_HEADER] = names


async def _serve(stack: AsyncExitStack, runner: web.AppRunner, make_site: Callable[[], PacedSite]) -> web.AppRunner:
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await _start(make_site())
    return runner


def _site(config: GatewayConfig, runner: web.AppRunner, context: ssl.SSLContext | None) -> PacedSite:
    if config.uds:  # replaces the socket file of an earlier process
        return PacedSite.at_path(runner, config.uds, context)
    return PacedSite.at_port(runner, config.host, config.port, context, config.reuse_port)


async def _start(site: PacedSite) -> None:
    try:
        await site.start()
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            raise ConfigError(f"{site.name} is in use: --port takes another") from e
        raise ConfigError(f"cannot listen on {site.name}: {e.strerror or e}") from e


def tls_context(tls: TlsConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # an empty password: an encrypted key fails instead of prompting at the terminal
        context.load_cert_chain(tls.certfile, tls.keyfile or None, password="")
        if tls.ca_certs:
            context.load_verify_locations(tls.ca_certs)
        context.verify_mode = ssl.VerifyMode(tls.cert_reqs)
    except (OSError, ValueError) as e:  # ssl.SSLError is an OSError
        key = f"--ssl-keyfile {tls.keyfile}" if tls.keyfile else "no --ssl-keyfile: the file must hold the key too"
        raise ConfigError(f"TLS: {e}; --ssl-certfile {tls.certfile}, {key}") from e
    return context

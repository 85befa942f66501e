"""The HTTP servers of a gateway: routes and middleware, listening sockets, TLS, draining."""

import asyncio
import errno
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from ssl import SSLContext
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from blockyard.services.api_gateway.batch_api.store import BatchStore
from blockyard.services.api_gateway.endpoints.adapters import AdapterEndpoints
from blockyard.services.api_gateway.endpoints.batches import BatchEndpoints
from blockyard.services.api_gateway.endpoints.documents import DocumentEndpoints
from blockyard.services.api_gateway.endpoints.files import FileEndpoints
from blockyard.services.api_gateway.endpoints.followed_responses import FollowedResponses
from blockyard.services.api_gateway.endpoints.generation import GenerationEndpoints
from blockyard.services.api_gateway.endpoints.info import InfoEndpoints, TokenizerInfoEndpoints
from blockyard.services.api_gateway.endpoints.operations import OperatorEndpoints
from blockyard.services.api_gateway.endpoints.pooling import PoolingEndpoints
from blockyard.services.api_gateway.endpoints.scale_out import ScaleOutEndpoints
from blockyard.services.api_gateway.endpoints.status import Pages, StatusEndpoints, installed_version
from blockyard.services.api_gateway.endpoints.stored_responses import StoredResponseEndpoints
from blockyard.services.api_gateway.http import connections, middleware
from blockyard.services.api_gateway.http.access import Guard
from blockyard.services.api_gateway.http.certificates import Certificates, tls_context
from blockyard.services.api_gateway.http.client_text import http_logger
from blockyard.services.api_gateway.http.connections import BoundedRunner
from blockyard.services.api_gateway.http.paced_site import PacedSite
from blockyard.services.api_gateway.http.request_context import IGNORED, REQUEST_ID
from blockyard.services.api_gateway.http.uploads import Uploads
from blockyard.services.api_gateway.http.user_middleware import UserMiddleware
from blockyard.services.api_gateway.metrics.scrape import CONTENT_TYPE
from blockyard.services.api_gateway.requests.ignored_fields import HEADER as IGNORED_HEADER
from blockyard.services.api_gateway.service import Gateway
from blockyard.shared.config.server.access_keys import AccessKey, all_keys
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.errors import ConfigError, RequestError
from blockyard.shared.process import open_files

log = logging.getLogger(__name__)

KEEPALIVE_S = 75.0  # idle connections are closed after this
POLL_S = 0.05
METRICS_CONNECTIONS = 64  # on --metrics-port
CERTIFICATES_S = 2.0  # between two looks at the files of the certificate
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

    def __init__(self, config: GatewayConfig, gateway: Gateway, guard: Guard, runners: list[web.AppRunner]) -> None:
        self._config, self._gateway, self._guard, self._runners = config, gateway, guard, runners
        address = runners[0].addresses[0]  # of a Unix socket, its path
        self.port: int = 0 if isinstance(address, str) else address[1]  # the bound port, also where the settings have 0

    def reload_keys(self) -> None:
        """Reads the key files again. If one cannot be used, all keys stay as they are, and a line says why."""
        try:
            api_keys, admin_keys = read_keys(self._config)
        except ConfigError as e:
            log.error("the keys stay as they are: %s", e)
            return
        self._guard.replace_keys(api_keys, admin_keys)
        log.info("%d API keys and %d admin keys are valid now", len(api_keys), len(admin_keys))

    async def refresh_certificates(self) -> None:
        """Gives new connections the certificate of changed files. Runs until cancelled; ends at once if it is off."""
        if self._config.tls is None or not self._config.tls.refresh:
            return
        certificates = Certificates(self._config.tls)
        while True:
            await asyncio.sleep(CERTIFICATES_S)
            if (context := certificates.changed()) is not None:
                for site in self._runners[0].sites:
                    assert isinstance(site, PacedSite)
                    site.replace_context(context)

    async def drain(self) -> None:
        """Accepts no new requests, waits for the open ones, and fails the rest after the shutdown timeout."""
        self._gateway.drain()
        for runner in self._runners:
            for site in list(runner.sites):
                await site.stop()
        loop = asyncio.get_running_loop()
        until = loop.time() + self._config.shutdown_timeout_s
        while self._gateway.num_active and loop.time() < until:
            await asyncio.sleep(POLL_S)
        if left := self._gateway.num_active:
            log.warning("%d requests did not end within %.0f s", left, self._config.shutdown_timeout_s)
            self._gateway.pipeline.abandon(RequestError("The server is shutting down.", status=503, retry_after_s=1.0))
            until = loop.time() + ABANDON_S
            while self._gateway.num_active and loop.time() < until:
                await asyncio.sleep(POLL_S)


@asynccontextmanager
async def listening(
    config: GatewayConfig, gateway: Gateway, store: BatchStore | None = None
) -> AsyncIterator[HttpServer]:
    """Binds and serves HTTP inside the block. `store`: of files and batches; None: there are none.

    Raises ConfigError if the port or the key files are not usable.
    """
    context = None if config.tls is None else tls_context(config.tls)
    guard = Guard(*read_keys(config))
    limits = {"max_headers": config.max_headers, "max_line_size": config.max_header_bytes}
    handling = _HANDLING | limits | {"max_field_size": config.max_header_bytes}
    async with AsyncExitStack() as stack:
        most = connections.bound(config.max_connections, open_files.raise_limit())
        extra = UserMiddleware(config.middleware, guard)
        built = build_app(config, gateway, guard, store, extra.of_aiohttp())
        app = BoundedRunner(built, most, extra.around, **handling)
        runners = [await _serve(stack, app, lambda: _site(config, app, context))]
        if config.uds:
            stack.callback(Path(config.uds).unlink, missing_ok=True)
        if config.metrics_port:
            metrics = BoundedRunner(build_metrics_app(gateway), METRICS_CONNECTIONS, **handling)
            host, port = config.host, config.metrics_port
            runners.append(await _serve(stack, metrics, lambda: PacedSite.at_port(metrics, host, port)))
        yield HttpServer(config, gateway, guard, runners)


def read_keys(config: GatewayConfig) -> tuple[list[AccessKey], list[AccessKey]]:
    """The API keys and the admin keys, of flags and files. Raises ConfigError if a file cannot be used."""
    api_keys = all_keys(config.api_keys, config.api_key_file, f"--api-key-file {config.api_key_file}")
    return api_keys, all_keys(config.admin_keys, config.admin_key_file, f"--admin-key-file {config.admin_key_file}")


def build_app(
    config: GatewayConfig,
    gateway: Gateway,
    guard: Guard,
    store: BatchStore | None = None,
    outer: Sequence[Middleware] = (),
) -> web.Application:
    """`outer`: middleware around that of the gateway."""
    preflights, cors_headers = middleware.cors(config.cors)
    app = web.Application(
        client_max_size=config.max_body_bytes,
        middlewares=[
            *outer,
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
    pages, version = Pages(), installed_version()
    following = FollowedResponses(gateway.stored, config.keepalive_s, config.client_timeout_s)
    generation = GenerationEndpoints(
        gateway.pipeline, gateway.streams, gateway.body_parser, uploads, gateway.stored, following
    )
    endpoints = (
        generation,
        StoredResponseEndpoints(gateway.stored, following),
        *((ScaleOutEndpoints(generation, gateway.pipeline),) if config.scale_out else ()),
        PoolingEndpoints(gateway.pipeline, gateway.body_parser, uploads),
        InfoEndpoints(gateway.pipeline, version, config.server_info),
        *((TokenizerInfoEndpoints(gateway.pipeline),) if config.tokenizer_info else ()),
        FileEndpoints(store, config.max_file_bytes, config.body_timeout_s),
        BatchEndpoints(store, uploads),
        StatusEndpoints(gateway, pages, version),
        OperatorEndpoints(gateway.client.controls, gateway.pipeline, uploads),
        AdapterEndpoints(gateway.client.controls, uploads, config.lora_dir),
    )
    routes = [route for each in endpoints for route in each.routes()]
    if config.serve_docs:
        routes += DocumentEndpoints(routes, config.root_path, version, pages, guard.needs_key).routes()
    root = config.root_path.strip("/")
    for prefix in dict.fromkeys(("", f"/{root}" if root else "")):  # some proxies strip their prefix, some do not
        for route in routes:
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


def _site(config: GatewayConfig, runner: web.AppRunner, context: SSLContext | None) -> PacedSite:
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

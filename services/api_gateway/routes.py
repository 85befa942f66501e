"""The HTTP application: which path does what."""

from collections.abc import Iterator
from importlib import metadata, resources
from mimetypes import guess_type

import msgspec
from aiohttp import web

from blockyard.services.api_gateway.endpoints import ring_view
from blockyard.services.api_gateway.endpoints.generation import Handlers, json_response
from blockyard.services.api_gateway.endpoints.operations import Operations
from blockyard.services.api_gateway.http import middleware
from blockyard.services.api_gateway.http.access import Access, Guard, Route
from blockyard.services.api_gateway.http.request_context import IGNORED, REQUEST_ID
from blockyard.services.api_gateway.http.uploads import Uploads
from blockyard.services.api_gateway.requests.ignored_fields import HEADER as IGNORED_HEADER
from blockyard.services.api_gateway.responses.error_body import ApiError
from blockyard.services.api_gateway.service import Gateway
from blockyard.shared.config.gateway import GatewayConfig
from blockyard.shared.messages import ModelCard, Role

EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
PAGE_TYPES = {".js": "text/javascript", ".svg": "image/svg+xml", ".css": "text/css", ".html": "text/html"}

PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class ModelView(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True):
    object: str
    data: list[ModelView]


class Version(msgspec.Struct, frozen=True):
    version: str


class Load(msgspec.Struct, frozen=True):
    server_load: int


class Health(msgspec.Struct, frozen=True):
    status: str


def build_app(config: GatewayConfig, gateway: Gateway) -> web.Application:
    preflights, cors_headers = middleware.cors(config.cors)
    guard = Guard(config.api_keys, config.admin_keys)
    app = web.Application(
        client_max_size=config.max_body_bytes,
        middlewares=[
            middleware.request_ids(config),
            middleware.errors(gateway),
            preflights,
            middleware.authorized(guard),
            middleware.json_only(guard),
            middleware.counted(gateway),
        ],
    )
    app.on_response_prepare.append(cors_headers)
    if config.enable_request_id_headers:
        app.on_response_prepare.append(_name_response)
    app.on_response_prepare.append(_name_ignored)
    uploads = Uploads(config.max_body_bytes, config.max_total_body_bytes, config.body_timeout_s)
    handlers, views = Handlers(gateway.flow, gateway.streams, gateway.bodies, uploads), _Views(gateway)
    operations = Operations(gateway.client.controls)
    root = config.root_path.strip("/")
    for prefix in dict.fromkeys(("", f"/{root}" if root else "")):  # proxies strip their prefix, or do not
        for method, path, handler, access in (*handlers.routes(), *views.routes(), *operations.routes()):
            guard.add(app, method, prefix + path, handler, access)
            if not path.endswith(("/", "}")):
                guard.add(app, method, f"{prefix}{path}/", handler, access)
    return app


def build_metrics_app(gateway: Gateway) -> web.Application:
    """This replica's own counters, for its own port."""

    async def own(_: web.Request) -> web.Response:
        return web.Response(body=gateway.metrics.own().encode(), headers={"Content-Type": EXPOSITION})

    app = web.Application()
    app.router.add_get("/metrics", own)
    return app


class _Views:
    """Answers that need no work in the ring."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._version = _version()
        self._page = _page_files()

    def routes(self) -> Iterator[Route]:
        for path, access, view in (
            ("/v1/models", Access.KEY, self.models),
            ("/v1/models/{model:.+}", Access.KEY, self.model),
            ("/health", Access.OPEN, self.health),
            ("/ping", Access.OPEN, self.health),
            ("/load", Access.OPEN, self.load),
            ("/live", Access.OPEN, self.live),
            ("/ready", Access.OPEN, self.ready),
            ("/metrics", Access.OPEN, self.metrics),
            ("/version", Access.OPEN, self.version),
            ("/ring", Access.KEY, self.ring),
            ("/", Access.OPEN, self.page),
            ("/page/{name}", Access.OPEN, self.page),
        ):
            yield "GET", path, view, access
        yield "POST", "/ping", self.health, Access.OPEN

    async def models(self, _: web.Request) -> web.Response:
        cards = self._gateway.flow.admission.cards()
        return json_response(ModelList("list", [_model(card, name) for card in cards for name in card.names]))

    async def model(self, request: web.Request) -> web.Response:
        name, admission = request.match_info["model"], self._gateway.flow.admission
        if not any(name in card.names for card in admission.cards()):
            name = name.rstrip("/")
        return json_response(_model(admission.card(name), name))

    async def health(self, _: web.Request) -> web.Response:
        if missing := ring_view.missing(self._gateway.links):
            raise ApiError(f"Unhealthy: no {', no '.join(missing)} serves.", status=503, retry_after_s=1.0)
        if not ring_view.progresses(self._gateway.links, self._gateway.progress.stalled):
            raise ApiError("No worker group makes progress.", status=503, retry_after_s=1.0)
        return json_response(Health("ok"))

    async def load(self, _: web.Request) -> web.Response:
        """Requests in progress: this gateway's as of now, the others' as of their last news."""
        members = self._gateway.links.members.values()
        others = sum(m.stats.active for m in members if m.role == Role.API_GATEWAY)
        return json_response(Load(self._gateway.flow.num_active + others))

    async def live(self, _: web.Request) -> web.Response:
        return json_response(Health("ok"))

    async def ready(self, _: web.Request) -> web.Response:
        if self._gateway.draining:
            raise ApiError("The server is shutting down.", status=503)
        if missing := ring_view.missing(self._gateway.links):
            raise ApiError(f"Not ready: {', '.join(missing)}.", status=503, retry_after_s=1.0)
        return json_response(Health("ok"))

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=(await self._gateway.metrics.all()).encode(), headers={"Content-Type": EXPOSITION})

    async def version(self, _: web.Request) -> web.Response:
        return json_response(Version(self._version))

    async def ring(self, _: web.Request) -> web.Response:
        body = ring_view.view(self._gateway.links)
        return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-store"})

    async def page(self, request: web.Request) -> web.Response:
        name = request.match_info.get("name", "index.html")
        if name not in self._page:
            raise web.HTTPNotFound
        kind = PAGE_TYPES.get("." + name.rpartition(".")[2]) or guess_type(name)[0] or "application/octet-stream"
        charset = "utf-8" if "text" in kind else None
        return web.Response(body=self._page[name], content_type=kind, charset=charset, headers=PAGE_HEADERS)


def _version() -> str:
    try:
        return metadata.version("blockyard")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "0+checkout"


def _page_files() -> dict[str, bytes]:
    """Read once: a request's path never reaches the file system."""
    folder = resources.files("blockyard.services.api_gateway") / "page"
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.is_file()} if folder.is_dir() else {}


def _model(card: ModelCard, name: str) -> ModelView:
    return ModelView(name, "model", card.created, "blockyard", card.root, None, card.max_model_len)


async def _name_response(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Request-Id"] = REQUEST_ID.get()


async def _name_ignored(request: web.Request, response: web.StreamResponse) -> None:
    if names := IGNORED.get():
        response.headers[IGNORED_HEADER] = names

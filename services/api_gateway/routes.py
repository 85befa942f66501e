"""The HTTP application: which path does what."""

from importlib import metadata, resources
from mimetypes import guess_type

import msgspec
from aiohttp import web

from blockyard.services.api_gateway import middleware, ring_view
from blockyard.services.api_gateway.caller import IGNORED, REQUEST_ID
from blockyard.services.api_gateway.errors import ApiError
from blockyard.services.api_gateway.handlers import Handlers, json_response
from blockyard.services.api_gateway.ignored_fields import HEADER as IGNORED_HEADER
from blockyard.services.api_gateway.operations import Operations
from blockyard.services.api_gateway.service import Gateway
from blockyard.shared.config.gateway import GatewayConfig
from blockyard.shared.messages import ModelCard

EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
PAGE_TYPES = {".js": "text/javascript", ".svg": "image/svg+xml", ".css": "text/css", ".html": "text/html"}


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


class Health(msgspec.Struct, frozen=True):
    status: str


def build_app(config: GatewayConfig, gateway: Gateway) -> web.Application:
    preflights, cors_headers = middleware.cors(config.cors)
    app = web.Application(
        client_max_size=config.max_body_bytes,
        middlewares=[
            middleware.request_ids(config),
            middleware.errors(gateway),
            preflights,
            middleware.api_keys(config),
            middleware.counted(gateway),
        ],
    )
    app.on_response_prepare.append(cors_headers)
    if config.enable_request_id_headers:
        app.on_response_prepare.append(_name_response)
    app.on_response_prepare.append(_name_ignored)
    handlers, views = Handlers(config, gateway.flow, gateway.streams), _Views(gateway)
    for prefix in dict.fromkeys(("", config.root_path.rstrip("/"))):  # proxies strip their prefix, or do not
        _add_routes(app, prefix, handlers, views, gateway)
    return app


def build_metrics_app(gateway: Gateway) -> web.Application:
    """This replica's own counters, for its own port."""

    async def own(_: web.Request) -> web.Response:
        return web.Response(body=gateway.metrics.own().encode(), headers={"Content-Type": EXPOSITION})

    app = web.Application()
    app.router.add_get("/metrics", own)
    return app


def _add_routes(app: web.Application, prefix: str, handlers: Handlers, views: "_Views", gateway: Gateway) -> None:
    for path, handler in {
        "/v1/chat/completions": handlers.chat,
        "/v1/completions": handlers.completion,
        "/tokenize": handlers.tokenize,
        "/detokenize": handlers.detokenize,
    }.items():
        app.router.add_post(prefix + path, handler)
    for path, view in {
        "/v1/models": views.models,
        "/v1/models/{model:.+}": views.model,
        "/health": views.health,
        "/live": views.live,
        "/ready": views.ready,
        "/metrics": views.metrics,
        "/version": views.version,
        "/ring": views.ring,
        "/": views.page,
        "/page/{name}": views.page,
    }.items():
        app.router.add_get(prefix + path, view)
    Operations(gateway.client.controls).add_routes(app, prefix)


class _Views:
    """Answers that need no work in the ring."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._version = _version()
        self._page = _page_files()

    async def models(self, _: web.Request) -> web.Response:
        cards = self._gateway.flow.admission.cards()
        return json_response(ModelList("list", [_model(card, name) for card in cards for name in card.names]))

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        return json_response(_model(self._gateway.flow.admission.card(name), name))

    async def health(self, _: web.Request) -> web.Response:
        if not ring_view.progresses(self._gateway.links, self._gateway.progress.stalled):
            raise ApiError("No worker group makes progress.", status=503, retry_after_s=1.0)
        return json_response(Health("ok"))

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
        return web.Response(body=self._page[name], content_type=kind, charset="utf-8" if "text" in kind else None)


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

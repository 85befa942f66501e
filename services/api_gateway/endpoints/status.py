"""Health, readiness, load, models, version, metrics, the ring's members and the playground page."""

from collections.abc import Iterator
from importlib import metadata, resources
from mimetypes import guess_type

import msgspec
from aiohttp import web

from blockyard.services.api_gateway.apis.messages.api import VERSION_HEADER, model_info, model_page
from blockyard.services.api_gateway.http.access import Access, Route
from blockyard.services.api_gateway.metrics.scrape import CONTENT_TYPE
from blockyard.services.api_gateway.responses.json_response import json_response
from blockyard.services.api_gateway.service import Gateway
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import AdapterCard, Member, ModelCard, Role
from blockyard.shared.ring_client.ring_links import RingLinks

# roles of which a deployment needs a ready member; one of pooling models alone makes no text
NEEDED = (Role.TOKENIZER_POOL, Role.SCHEDULER, Role.GPU_WORKER, Role.DETOKENIZER)
PAGE_TYPES = {".js": "text/javascript", ".svg": "image/svg+xml", ".css": "text/css", ".html": "text/html"}

PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
RANK_SILENT_S = 2.0  # a rank that runs gives a sign of life twice a second


class ModelView(msgspec.Struct, frozen=True, omit_defaults=True):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    task: str | None = None  # of a pooling model
    width: int | None = None  # of its vectors, or the number of its labels


class ModelList(msgspec.Struct, frozen=True):
    object: str
    data: list[ModelView]


class Version(msgspec.Struct, frozen=True):
    version: str


class ServerLoad(msgspec.Struct, frozen=True):
    server_load: int


class Health(msgspec.Struct, frozen=True):
    status: str


class StatsView(msgspec.Struct, frozen=True):
    running: int
    waiting: int
    requests_total: int
    prompt_tokens_total: int
    output_tokens_total: int
    preemptions_total: int
    blocks_used: int
    blocks_total: int
    steps_total: int
    rss_bytes: int
    malformed_total: int
    arriving: int
    transfers_open: int
    transfers_landed_total: int
    transfers_aborted_total: int
    blocks_quarantined: int


class RankView(msgspec.Struct, frozen=True):
    rank: int
    pid: int
    rss_bytes: int
    state: str  # "running", or "silent": no sign of life for a while


class MemberView(msgspec.Struct, frozen=True):
    name: str
    role: str
    incarnation: str  # 64 bits in hex: too large for a JavaScript number
    model: str
    ready: bool
    phase: str
    progress: float
    notes: list[str]
    stats: StatsView
    kv_role: str  # "prefill", "decode" or "both"; empty: no KV transfers
    sends_to: list[str]  # incarnations of workers that this one sends KV blocks to
    ranks: list[RankView]  # of a worker with several


class Totals(msgspec.Struct, frozen=True):
    """Requests counted by the gateways, tokens and blocks counted by the schedulers."""

    requests_total: int
    prompt_tokens_total: int
    output_tokens_total: int
    running: int
    waiting: int
    preemptions_total: int
    blocks_used: int
    blocks_total: int


class RingView(msgspec.Struct, frozen=True):
    members: list[MemberView]
    totals: Totals


class Pages:
    """The files of `page/`, read at the start, so that a request's path never reaches the file system."""

    def __init__(self) -> None:
        folder = resources.files("blockyard.services.api_gateway") / "page"
        self._files = {f.name: f.read_bytes() for f in folder.iterdir() if f.is_file()} if folder.is_dir() else {}

    def response(self, name: str) -> web.Response:
        """Raises a 404."""
        if name not in self._files:
            raise web.HTTPNotFound
        kind = PAGE_TYPES.get("." + name.rpartition(".")[2]) or guess_type(name)[0] or "application/octet-stream"
        charset = "utf-8" if "text" in kind else None
        return web.Response(body=self._files[name], content_type=kind, charset=charset, headers=PAGE_HEADERS)


class StatusEndpoints:
    """Routes that are answered from this gateway's own state."""

    def __init__(self, gateway: Gateway, pages: Pages, version: str) -> None:
        self._gateway, self._version = gateway, version
        self._pages = pages

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
            yield Route("GET", path, view, access)
        yield Route("POST", "/ping", self.health, Access.OPEN)

    async def models(self, request: web.Request) -> web.Response:
        """The models that are served."""
        cards = self._gateway.pipeline.schedulers.cards()
        if VERSION_HEADER in request.headers:
            return json_response(model_page(cards))
        models = [_model(card, name) for card in cards for name in card.names]
        models += [_adapter(card.with_adapter(one), one) for card in cards for one in card.adapters]
        return json_response(ModelList("list", models))

    async def model(self, request: web.Request) -> web.Response:
        """One model that is served."""
        name, schedulers = request.match_info["model"], self._gateway.pipeline.schedulers
        if not any(name in card.names for card in schedulers.cards()):
            name = name.rstrip("/")
        card = schedulers.card(name)
        if card.named_adapter is not None and VERSION_HEADER not in request.headers:
            return json_response(_adapter(card, card.named_adapter))
        return json_response(model_info(card, name) if VERSION_HEADER in request.headers else _model(card, name))

    async def health(self, _: web.Request) -> web.Response:
        """200 if requests can be served: members of every role are ready and steps are done."""
        if missing := _missing_roles(self._gateway.links):
            raise RequestError(f"Unhealthy: no {', no '.join(missing)} serves.", status=503, retry_after_s=1.0)
        if not _makes_progress(self._gateway.links, self._gateway.stall_detector.stalled):
            raise RequestError("No worker group makes progress.", status=503, retry_after_s=1.0)
        return json_response(Health("ok"))

    async def load(self, _: web.Request) -> web.Response:
        """Open generation requests: of this gateway now, of the other gateways as last reported."""
        members = self._gateway.links.members.values()
        others = sum(m.stats.active for m in members if m.role == Role.API_GATEWAY)
        return json_response(ServerLoad(self._gateway.pipeline.num_active + others))

    async def live(self, _: web.Request) -> web.Response:
        """200 while the process runs."""
        return json_response(Health("ok"))

    async def ready(self, _: web.Request) -> web.Response:
        """200 if new requests are taken."""
        if self._gateway.draining:
            raise RequestError("The server is shutting down.", status=503)
        if missing := _missing_roles(self._gateway.links):
            raise RequestError(f"Not ready: {', '.join(missing)}.", status=503, retry_after_s=1.0)
        return json_response(Health("ok"))

    async def metrics(self, _: web.Request) -> web.Response:
        """Metrics in the text format of Prometheus."""
        return web.Response(body=(await self._gateway.metrics.all()).encode(), headers={"Content-Type": CONTENT_TYPE})

    async def version(self, _: web.Request) -> web.Response:
        """The version of the server."""
        return json_response(Version(self._version))

    async def ring(self, _: web.Request) -> web.Response:
        """The members of the ring and their load."""
        body = _ring_json(self._gateway.links)
        return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-store"})

    async def page(self, request: web.Request) -> web.Response:
        """The playground and its files."""
        return self._pages.response(request.match_info.get("name", "index.html"))


def installed_version() -> str:
    try:
        return metadata.version("blockyard")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "0+checkout"


def _model(card: ModelCard, name: str) -> ModelView:
    of_pooling = () if card.pooling is None else (card.pooling.task.value, card.pooling.width)
    return ModelView(name, "model", card.created, "blockyard", card.root, None, card.max_model_len, *of_pooling)


def _adapter(card: ModelCard, adapter: AdapterCard) -> ModelView:
    """An adapter, as a model of its own with its base as parent."""
    name, root, parent = adapter.name, adapter.root, adapter.parent
    return ModelView(name, "model", adapter.created, "blockyard", root, parent, card.max_model_len)


def _ring_json(links: RingLinks) -> bytes:
    members = [links.me, *links.members.values()]
    members.sort(key=lambda m: (list(Role).index(m.role), m.name))
    return msgspec.json.encode(RingView([_member(m) for m in members], _totals(members)))


def _missing_roles(links: RingLinks) -> list[str]:
    cards = [member.card for member in links.members.values() if member.card is not None]
    pools = bool(cards) and all(card.pooling is not None for card in cards)
    return [role.value for role in NEEDED if not links.of(role) and not (pools and role is Role.DETOKENIZER)]


def _makes_progress(links: RingLinks, stalled: frozenset[int]) -> bool:
    """True if a worker is ready and the step count of a scheduler moves."""
    moving = [m for m in links.of(Role.SCHEDULER) if m.incarnation not in stalled]
    return bool(moving and links.of(Role.GPU_WORKER))


def _member(m: Member) -> MemberView:
    return MemberView(
        name=m.name,
        role=m.role.value,
        incarnation=f"{m.incarnation:016x}",
        model=m.model,
        ready=m.ready,
        phase=m.phase,
        progress=m.progress,
        notes=m.notes,
        stats=StatsView(**{field: getattr(m.stats, field) for field in StatsView.__struct_fields__}),
        kv_role=m.kv_role or "",
        sends_to=[f"{worker:016x}" for worker in m.stats.sends_to],
        ranks=[
            RankView(one.rank, one.pid, one.rss_bytes, "silent" if one.silent_s > RANK_SILENT_S else "running")
            for one in m.stats.ranks
        ],
    )


def _totals(members: list[Member]) -> Totals:
    def total(field: str) -> int:
        role = Role.API_GATEWAY if field == "requests_total" else Role.SCHEDULER
        return sum(getattr(m.stats, field) for m in members if m.role == role)

    return Totals(**{field: total(field) for field in Totals.__struct_fields__})

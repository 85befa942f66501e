"""Which key each route needs. Access depends on the matched route, never on the text of the path."""

import asyncio
import enum
import hmac
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from aiohttp import web
from aiohttp.typedefs import Handler
from yarl import URL

from blockyard.services.api_gateway.apis.chat import CHAT
from blockyard.services.api_gateway.apis.interface import Api
from blockyard.services.api_gateway.apis.messages.api import MESSAGES, VERSION_HEADER
from blockyard.shared.config.server.access_keys import AccessKey
from blockyard.shared.errors import RequestError

# Headers set by proxies. A proxied request's peer address is the proxy's, not the client's.
FORWARDED = ("Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP", "CF-Connecting-IP")
HOW_TO_SEND = "send `Authorization: Bearer KEY` or `X-Api-Key: KEY`"


class Access(enum.Enum):
    OPEN = enum.auto()
    KEY = enum.auto()  # an API key or the admin key, if API keys are configured
    OPERATOR = enum.auto()  # the admin key; an API key if there is no admin key; without any key, only this machine


class Route(NamedTuple):
    method: str
    path: str
    handler: Handler
    access: Access
    api: Api | None = None  # that the route belongs to; None: to none alone
    body_type: str = "application/json"  # of a POST; empty: it needs no body


class Keys:
    """Keys of one kind, compared in constant time."""

    def __init__(self, keys: Iterable[AccessKey]) -> None:
        self._keys = [(key.key.encode(), key.tenant) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, given: Iterable[bytes]) -> str | None:
        """The tenant of the first key that is given."""
        for one in given:
            matches = [tenant for key, tenant in self._keys if hmac.compare_digest(key, one)]
            if matches:
                return matches[0]
        return None


class Guard:
    """Knows the routes, and checks the access of each. A route that was not registered here needs a key."""

    def __init__(self, api_keys: Sequence[AccessKey], admin_keys: Sequence[AccessKey]) -> None:
        self._routes: dict[web.AbstractRoute, Route] = {}
        self._paths: dict[str, Api] = {}  # of routes that belong to an API
        self.replace_keys(api_keys, admin_keys)

    def replace_keys(self, api_keys: Sequence[AccessKey], admin_keys: Sequence[AccessKey]) -> None:
        """Later requests need one of these keys. Open ones continue."""
        self._api, self._admin = Keys(api_keys), Keys(admin_keys)

    def needs_key(self, access: Access) -> bool:
        """Whether routes of this access need one of the keys, as long as they are not replaced."""
        return bool(self._api and access is not Access.OPEN) or bool(self._admin and access is Access.OPERATOR)

    def add(self, app: web.Application, route: Route, path: str) -> None:
        """Registers a route at this path. GET also answers HEAD."""
        for method in ("GET", "HEAD") if route.method == "GET" else (route.method,):
            self._routes[app.router.add_route(method, path, route.handler)] = route
        if route.api is not None:
            self._paths[path] = route.api

    def api(self, request: web.Request) -> Api:
        """Returns the API that the client speaks, for errors: the path's API, else the API that its headers tell."""
        route = self._routes.get(request.match_info.route)
        api = None if route is None else route.api
        return self.api_of_path(request) if api is None else api

    def api_of_path(self, request: web.BaseRequest) -> Api:
        """As `api`, of a request that no route was looked up for."""
        api = self._paths.get(request.path)
        if api is not None:
            return api
        return MESSAGES if VERSION_HEADER in request.headers else CHAT

    def body_type(self, request: web.Request) -> str:
        """The content type that the matched route takes in a POST; empty: it needs no body."""
        route = self._routes.get(request.match_info.route)
        return "application/json" if route is None else route.body_type

    def access(self, request: web.Request) -> Access:
        """The access of the matched route; OPEN if none matched, because the answer is a 404 or a 405 then."""
        if request.match_info.http_exception is not None:
            return Access.OPEN
        route = self._routes.get(request.match_info.route)
        return Access.KEY if route is None else route.access

    def tenant(self, request: web.Request) -> str:
        """The client's tenant: that of its API key, "admin", or "" without a key. Raises RequestError: 401, 403."""
        access = self.access(request)
        given = _given_keys(request)
        if access is Access.OPEN:
            return ""
        if self._admin and self._admin.find(given) is not None:
            return "admin"
        if access is Access.OPERATOR:
            if self._admin:
                raise RequestError(f"The admin key is missing or wrong: {HOW_TO_SEND}.", status=401)
            if not self._api:
                check_local(request)
                return ""
        tenant = self._api.find(given)
        if self._api and tenant is None:
            raise RequestError(f"The API key is missing or wrong: {HOW_TO_SEND}.", status=401)
        return tenant or ""


def check_local(request: web.Request) -> None:
    """Raises RequestError unless the request comes from this machine and not from another host's web page."""
    if any(name in request.headers for name in FORWARDED) or not _peer_is_local(request.transport):
        raise RequestError(
            "Without a key this answers only to this machine: start the server with --admin-key or --api-key.",
            status=403,
        )
    origin = request.headers.get("Origin")
    if origin is not None and not _is_loopback(_host_of(origin)):
        raise RequestError("Without a key this does not answer to web pages of other machines.", "Origin", status=403)


def _peer_is_local(transport: asyncio.BaseTransport | None) -> bool:
    if transport is None:
        return False
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family == socket.AF_UNIX:
        return True
    peer = transport.get_extra_info("peername")
    return isinstance(peer, tuple) and _is_loopback(str(peer[0]))


def _given_keys(request: web.Request) -> list[bytes]:
    """The request's keys; clients may send an account's token beside a key. Headers may hold any bytes."""
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    given = [bearer if scheme.lower() == "bearer" else "", request.headers.get("X-Api-Key", "")]
    return [key.strip().encode("utf-8", "surrogateescape") for key in given if key.strip()]


def _host_of(origin: str) -> str:
    try:
        return URL(origin).host or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    """For a host name or an address, also IPv4 in IPv6."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback

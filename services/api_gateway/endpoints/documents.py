"""/openapi.json, written from the routes and the Structs of their bodies, and the pages that show it."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from msgspec import inspect as types

from blockyard.services.api_gateway.apis.chat import CHAT
from blockyard.services.api_gateway.apis.pooling.registry import POOLING_APIS
from blockyard.services.api_gateway.apis.registry import APIS
from blockyard.services.api_gateway.batch_api.objects import CreateBatch
from blockyard.services.api_gateway.bodies.invocations import INVOKED
from blockyard.services.api_gateway.endpoints.files import FORM as UPLOAD
from blockyard.services.api_gateway.endpoints.files import PURPOSES
from blockyard.services.api_gateway.endpoints.operations import AbortRequests
from blockyard.services.api_gateway.endpoints.status import Pages
from blockyard.services.api_gateway.http.access import Access, Route
from blockyard.services.api_gateway.requests.schemas import NOT_BUILT, DetokenizeRequest, TokenizeRequest
from blockyard.services.api_gateway.responses.json_response import JSON
from blockyard.shared.errors import RequestError

Json = dict[str, Any]

VERSION = "3.1.0"  # of OpenAPI
KEYS: dict[Access, list[Json]] = {Access.OPEN: [], Access.KEY: [{"key": []}], Access.OPERATOR: [{"adminKey": []}]}
TAGS = {Access.OPEN: "status", Access.KEY: "text", Access.OPERATOR: "operators"}
# routes that take a body and that `APIS` lacks -> the Structs it may be
BODIES: dict[str, tuple[type[msgspec.Struct], ...]] = {
    "/tokenize": (TokenizeRequest,),
    "/detokenize": (DetokenizeRequest,),
    "/abort_requests": (AbortRequests,),
    "/v1/batches": (CreateBatch,),
    "/invocations": tuple(api.schema for api in INVOKED),
}
FORM: Json = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {"purpose": {"enum": list(PURPOSES)}, "file": {"type": "string", "format": "binary"}},
}
# answers that are no JSON
CONTENT_TYPES = {"/metrics": "text/plain", "/v1/files/{file_id}/content": "application/octet-stream"}
QUERIES: dict[str, tuple[str, ...]] = {
    "/v1/responses/{response_id}": ("stream", "starting_after", "include"),
    "/v1/responses/{response_id}/input_items": ("after", "limit", "order", "include"),
}
QUERIES |= {"/pause": ("mode", "clear_cache"), "/sleep": ("level",), "/wake_up": ("tags",)}
SUMMARIES = {
    "/v1/messages": "Answers a conversation in the form of the Messages API.",
    "/v1/messages/count_tokens": "The number of tokens of such a conversation.",
    "/v1/responses/input_tokens": "The number of tokens of such a request.",
}
PAGES = ("/", "/page/{name}")  # are not part of the API
BODIES |= {path: (api.schema,) for api in APIS.values() for path in api.paths}
BODIES |= {path: (pooling.schema,) for pooling in POOLING_APIS.values() for path in pooling.paths}
REFUSED = {api.schema: api.refused for api in APIS.values()}
NUMBERS = {types.IntType: "integer", types.FloatType: "number"}
SIMPLE = {types.BoolType: "boolean", types.StrType: "string", types.NoneType: "null", types.BytesType: "string"}


class DocumentEndpoints:
    """The document does not change while the server runs: it is written once."""

    def __init__(
        self,
        routes: Sequence[Route],
        root_path: str,
        version: str,
        pages: Pages,
        needs_key: Callable[[Access], bool],
    ) -> None:
        self._pages = pages
        self._body = msgspec.json.encode(document(routes, root_path, version, needs_key))

    def routes(self) -> Iterator[Route]:
        yield Route("GET", "/openapi.json", self.openapi, Access.OPEN)
        yield Route("GET", "/docs", self.page, Access.OPEN)
        yield Route("GET", "/redoc", self.page, Access.OPEN)

    async def openapi(self, _: web.Request) -> web.Response:
        """This document."""
        return web.Response(body=self._body, content_type=JSON)

    async def page(self, request: web.Request) -> web.Response:
        """A page that shows this document; on /docs requests can be tried."""
        if request.path.endswith("/"):  # its links are relative
            raise web.HTTPMovedPermanently("../" + request.path.rstrip("/").rpartition("/")[2])
        return self._pages.response("docs.html")


def document(routes: Iterable[Route], root_path: str, version: str, needs_key: Callable[[Access], bool]) -> Json:
    """An OpenAPI document of these routes. Links of clients begin with `root_path`.

    A key that the server does not need is shown as one of two ways, so that clients may send one.
    """
    components = Components()
    paths: dict[str, Json] = {}
    for route in routes:
        if route.path in PAGES:
            continue
        path = route.path.replace(":.+}", "}")
        operation = _operation(route, path, components)
        if KEYS[route.access] and not needs_key(route.access):
            operation["security"] = [{}, *KEYS[route.access]]
        paths.setdefault(path, {})[route.method.lower()] = operation
    root = root_path.strip("/")
    return {
        "openapi": VERSION,
        "info": {"title": "Blockyard", "version": version},
        "servers": [{"url": f"/{root}" if root else "/"}],
        "paths": paths,
        "components": {
            "schemas": components.schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "--api-key"},
                "adminKey": {"type": "http", "scheme": "bearer", "description": "--admin-key"},
            },
        },
    }


def _operation(route: Route, path: str, components: "Components") -> Json:
    error = msgspec.json.decode((route.api or CHAT).error_body(RequestError("What is wrong.", "field")))
    structs = BODIES.get(path, ()) if route.method == "POST" else ()
    streams = any("stream" in struct.__struct_fields__ for struct in structs)
    answers: Json = {"text/event-stream": {"schema": {"type": "string"}}} if streams else {}
    operation: Json = {
        "operationId": f"{route.method.lower()}{path.translate(str.maketrans('/{}.', '____'))}",
        "summary": summary_of(route),
        "tags": [TAGS[route.access]],
        "security": KEYS[route.access],
        "responses": {
            "200": {"description": "The answer.", "content": {CONTENT_TYPES.get(path, JSON): {"schema": {}}} | answers},
            "default": {
                "description": "An error.",
                "content": {JSON: {"schema": {"type": "object"}, "example": error}},
            },
        },
    }
    names = [(part[1:-1], "path") for part in path.split("/") if part.startswith("{")]
    names += [(name, "query") for name in QUERIES.get(path, ())]
    if names:
        operation["parameters"] = [
            {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}
            for name, place in names
        ]
    if structs:
        schemas = [components.reference(struct) for struct in structs]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    elif route.body_type == UPLOAD:
        operation["requestBody"] = {"required": True, "content": {UPLOAD: {"schema": FORM}}}
    return operation


def summary_of(route: Route) -> str:
    """The handler's docstring, or that of the body's Struct."""
    handler = route.handler.func if isinstance(route.handler, partial) else route.handler
    if route.path in SUMMARIES:
        return SUMMARIES[route.path]
    structs = BODIES.get(route.path, ())
    said = [inspect.getdoc(handler), *(struct.__dict__.get("__doc__") for struct in structs)]
    return next((text for text in said if text), route.path).partition("\n")[0]


class Components:
    """JSON Schemas of Structs, by name. msgspec writes none for a Struct with a default of type `Raw`."""

    def __init__(self) -> None:
        self.schemas: dict[str, Json] = {}
        self._names: dict[type[msgspec.Struct], str] = {}

    def reference(self, struct: type[msgspec.Struct]) -> Json:
        name = self._names.get(struct)
        if name is None:
            name = struct.__name__
            if name in self.schemas:  # Structs of two APIs may have one name
                name = "".join(part.title() for part in struct.__module__.split(".")[-2:]) + name
            self._names[struct] = name
            self.schemas[name] = {}  # a Struct may contain itself
            found = types.type_info(struct)
            assert isinstance(found, types.StructType)
            self.schemas[name] = self._object(found)
        return {"$ref": f"#/components/schemas/{name}"}

    def _object(self, struct: types.StructType) -> Json:
        required = [field.encode_name for field in struct.fields if field.required]
        refused = REFUSED.get(struct.cls, frozenset())
        properties = {field.encode_name: self._property(field, field.name in refused) for field in struct.fields}
        schema: Json = {"type": "object", "properties": properties}
        if struct.tag is not None:
            properties[struct.tag_field or "type"] = {"const": struct.tag}
        return schema | ({"required": required} if required else {})

    def _property(self, field: types.Field, is_refused: bool) -> Json:
        schema = self._schema(field.type)
        if is_refused:
            return schema | {"description": "Refused: the error says what to send in its place."}
        if field.encode_name in NOT_BUILT:
            harmless = [msgspec.json.encode(value).decode() for value in (None, *NOT_BUILT[field.encode_name])]
            return schema | {"description": f"Not built: other values than {' or '.join(harmless)} are refused."}
        default = field.default
        has_default = isinstance(default, str | int | float) and not isinstance(default, msgspec.Raw)
        return schema | ({"default": default} if has_default else {})

    def _schema(self, kind: types.Type) -> Json:
        match kind:
            case types.Metadata():
                return self._schema(kind.type)
            case types.StructType():
                return self.reference(kind.cls)
            case types.UnionType():
                return {"anyOf": [self._schema(each) for each in kind.types]}
            case types.ListType() | types.SetType() | types.VarTupleType():
                return {"type": "array", "items": self._schema(kind.item_type)}
            case types.TupleType():
                return {"type": "array", "prefixItems": [self._schema(each) for each in kind.item_types]}
            case types.DictType():
                return {"type": "object", "additionalProperties": self._schema(kind.value_type)}
            case types.LiteralType():
                return {"enum": list(kind.values)}
            case types.EnumType():
                return {"enum": [each.value for each in kind.cls]}
            case types.IntType() | types.FloatType():
                limits = {"minimum": kind.ge, "maximum": kind.le}
                return {"type": NUMBERS[type(kind)]} | {name: at for name, at in limits.items() if at is not None}
            case _:
                return {"type": SIMPLE[type(kind)]} if type(kind) in SIMPLE else {}  # {}: any value

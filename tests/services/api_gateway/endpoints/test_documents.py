"""/openapi.json and its pages: the document describes what the server takes, and the pages need no other host."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from aiohttp import web
from openai.types import chat

from blockyard.services.api_gateway.apis.completions import COMPLETIONS
from blockyard.services.api_gateway.apis.responses.schemas import ResponsesRequest
from blockyard.services.api_gateway.endpoints.documents import Components, document
from blockyard.services.api_gateway.http.access import Access, Guard, Route
from blockyard.services.api_gateway.requests.schemas import ChatRequest
from blockyard.services.api_gateway.server import build_app

PAGE = Path(__file__).parents[4] / "services/api_gateway/page"
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "tool_choice": "none",
    "max_tokens": 3,
    "stop": ["a", "b"],
    "stream_options": {"include_usage": True},
    "stream": True,
    "reasoning_effort": "low",
    "tools": [{"type": "function", "function": {"name": "f"}}],
}


async def fetched(r: Any, path: str = "/openapi.json") -> Any:
    async with r.http.get(path) as response:
        assert response.status == 200
        return await response.json()


def validator(api: dict[str, Any], name: str) -> jsonschema.Draft202012Validator:
    schema = {"$ref": f"#/components/schemas/{name}", "components": api["components"]}
    jsonschema.Draft202012Validator.check_schema(api["components"]["schemas"][name])
    return jsonschema.Draft202012Validator(schema)


async def test_every_route_is_described_with_its_key(rig) -> None:
    async with rig(api_keys=["secret"], admin_keys=["root"]) as r:
        api = await fetched(r)  # without a key
        app = build_app(r.gateway_config, r.gateway, Guard([], []))
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.resource and route.method != "HEAD"
    }
    bare = {(method, path) for method, path in routes if not path.endswith("/")}
    described = {(method, path) for path, methods in api["paths"].items() for method in methods}
    assert bare - described == {("get", f"/{page}") for page in ("openapi.json", "docs", "redoc", "page/{name}")}
    assert described <= routes
    operations = [one for methods in api["paths"].values() for one in methods.values()]
    assert len({one["operationId"] for one in operations}) == len(operations)
    needs = {path: next(iter(methods.values()))["security"] for path, methods in api["paths"].items()}
    assert needs["/health"] == [] and needs["/v1/models"] == [{"key": []}] and needs["/sleep"] == [{"adminKey": []}]


async def test_a_key_that_is_not_needed_may_be_left_out(rig) -> None:
    async with rig() as r:
        operations = {path: next(iter(methods.values())) for path, methods in (await fetched(r))["paths"].items()}
    assert operations["/v1/models"]["security"] == [{}, {"key": []}] and operations["/health"]["security"] == []
    assert operations["/sleep"]["security"] == [{}, {"adminKey": []}]


async def test_bodies_and_answers_that_are_no_json(rig) -> None:
    async with rig() as r:
        paths = (await fetched(r))["paths"]
        async with r.http.get("/metrics") as response:
            assert response.content_type in paths["/metrics"]["get"]["responses"]["200"]["content"]
    form = paths["/v1/files"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert form["required"] == ["purpose", "file"]
    batch = paths["/v1/batches"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert batch == {"$ref": "#/components/schemas/CreateBatch"}
    assert [method for method, one in paths["/v1/batches"].items() if "requestBody" in one] == ["post"]


async def test_bodies_that_the_server_takes_are_valid_and_wrong_ones_are_not(rig) -> None:
    async with rig() as r:
        api = await fetched(r)
        schema = api["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ChatRequest"}
        wrong = [{"messages": "hi"}, CHAT | {"max_tokens": "many"}, CHAT | {"reasoning_effort": "huge"}]
        statuses = [(await r.post("/v1/chat/completions", body))[0] for body in wrong]
        async with r.http.post("/v1/chat/completions", json=CHAT) as response:
            assert response.status == 200
    check = validator(api, "ChatRequest")
    assert check.is_valid(CHAT)
    assert [(status, check.is_valid(body)) for status, body in zip(statuses, wrong, strict=True)] == [(400, False)] * 3
    assert not validator(api, "DetokenizeRequest").is_valid({"model": "tiny"})


def test_fields_of_the_official_client_are_in_the_document() -> None:
    made = Components()
    made.reference(ChatRequest)
    fields = made.schemas["ChatRequest"]["properties"]
    official = {name for name in chat.completion_create_params.CompletionCreateParamsBase.__annotations__}
    assert official - set(fields) == set()
    assert fields["max_tokens"]["anyOf"] == [{"type": "integer"}, {"type": "null"}]
    assert fields["audio"]["description"] == "Not built: other values than null are refused."
    made.reference(ResponsesRequest)
    of_responses = made.schemas["ResponsesRequest"]["properties"]
    assert "in its place" in of_responses["max_tokens"]["description"]
    assert "description" not in of_responses["max_output_tokens"] and "description" not in fields["max_tokens"]


def test_a_struct_that_contains_itself_is_written_once() -> None:
    class Node(msgspec.Struct):
        name: str
        children: list["Node"] = []
        weight: float = 0.5

    Node.__annotations__["children"] = list[Node]
    made = Components()
    assert made.reference(Node) == {"$ref": "#/components/schemas/Node"}
    assert made.schemas == {
        "Node": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#/components/schemas/Node"}},
                "weight": {"type": "number", "default": 0.5},
            },
        }
    }


@pytest.mark.parametrize(("root", "url"), [("", "/"), ("/llm", "/llm"), ("llm/v2/", "/llm/v2")])
async def test_links_begin_with_the_root_path(rig, root: str, url: str) -> None:
    async with rig(root_path=root) as r:
        for prefix in {"", url.rstrip("/")}:
            assert (await fetched(r, f"{prefix}/openapi.json"))["servers"] == [{"url": url}]
            for path in ("/docs", "/redoc"):
                async with r.http.get(f"{prefix}{path}") as response:
                    page = await response.text()
                assert response.status == 200 and "default-src 'none'" in response.headers["Content-Security-Policy"]
                async with r.http.get(f"{prefix}{path}/", allow_redirects=True) as response:
                    assert str(response.url.path) == f"{prefix}{path}"
                for link in re.findall(r'(?:src|href)="([^"]+)"', page):
                    async with r.http.get(f"{prefix}/{link}") as response:
                        assert response.status == 200, link


async def test_the_flag_turns_all_of_it_off(rig) -> None:
    async with rig(serve_docs=False) as r:
        for path in ("/openapi.json", "/docs", "/redoc"):
            async with r.http.get(path) as response:
                assert response.status == 404


def test_the_page_needs_no_other_host() -> None:
    for name in ("docs.html", "docs.js", "docs.css"):
        text = (PAGE / name).read_text()
        assert not re.search(r"https?:|[\"'(]//|@import|innerHTML|eval\(", text), name


def test_errors_are_shown_as_the_api_of_the_route_writes_them() -> None:
    async def handler(request: web.Request) -> web.Response:
        raise NotImplementedError

    own = replace(COMPLETIONS, error_body=lambda error: b'{"own": "%s"}' % error.field.encode())
    route = Route("GET", "/v1/{one:.+}/x", handler, Access.KEY, own)
    operation = document([route], "", "1", lambda _: True)["paths"]["/v1/{one}/x"]["get"]
    assert operation["responses"]["default"]["content"]["application/json"]["example"] == {"own": "field"}
    assert operation["parameters"][0]["name"] == "one"

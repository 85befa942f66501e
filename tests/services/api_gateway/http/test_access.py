"""Access: every route under every prefix, keys of clients and operators, requests from web pages."""

import asyncio
import contextlib
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from yarl import URL

from blockyard.services.api_gateway.http.access import Guard, check_local
from blockyard.services.api_gateway.http.connections import BoundedRunner
from blockyard.services.api_gateway.server import build_app
from blockyard.shared.errors import ConfigError, RequestError
from blockyard.shared.messages import Control, Generate

OPEN = {"/health", "/ping", "/load", "/live", "/ready", "/metrics", "/version", "/", "/page/{name}"}
OPEN |= {"/openapi.json", "/docs", "/redoc"}
PREFIXES = ["", "/", "/v1", "/v1/", "v1", "/v", "/llm", "/v1/models", "/health", "/ring", "/page", "/tokenize/"]
OPERATIONS = ("/reset_prefix_cache", "/pause", "/resume", "/sleep", "/wake_up")
ASKS = {"prompt": "x", "max_tokens": 1}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def routes(r: Any) -> list[tuple[str, str]]:
    app = build_app(r.gateway_config, r.gateway, Guard([], []))
    return [(route.method, route.resource.canonical) for route in app.router.routes() if route.resource]


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_every_route_under_every_prefix_asks_for_the_key(rig, prefix: str) -> None:
    """Regression: `--root-path /v1` made `/v1/models` look like `/models`, which needed no key."""
    async with rig(api_keys=["secret"], root_path=prefix) as r:
        root = "/" + prefix.strip("/") if prefix.strip("/") else ""
        known = routes(r)
        assert len(known) >= 20 * (2 if root else 1)
        asked = set()
        for method, path in known:
            bare = {path, path.removeprefix(root)} if root and path.startswith(root) else {path}
            bare = {each.rstrip("/") or each for each in bare}
            url = path.replace("{model}", "tiny").replace("{name}", "style.css")
            url = url.replace("{file_id}", "file-a").replace("{batch_id}", "batch_a")
            url = url.replace("{response_id}", "resp_a")
            async with r.http.request(method, url, json={} if method == "POST" else None) as response:
                is_open = bool(bare & OPEN) and (method in ("GET", "HEAD") or bare & OPEN == {"/ping"})
                ours = root in ("/ring", "/v1/models")  # a prefix that is a route of its own, which asks for the key
                assert response.status == 401 or is_open, (method, path, response.status)
                assert response.status != 401 or not is_open or ours, (method, path)
            asked.add((method, path))
        assert {("POST", root + path) for path in ("/v1/chat/completions", *OPERATIONS)} <= asked
        assert not r.ring.frames(Generate) and not r.ring.frames(Control)
        assert (await r.post(f"{root}/v1/completions", ASKS, headers=bearer("secret")))[0] == 200


@pytest.mark.parametrize("root", ["/v1", "/llm"])
async def test_no_spelling_of_a_path_goes_past_the_key(rig, root: str) -> None:
    tricks = [
        "//v1/models",
        "/v1//models",
        "/v1/./models",
        "/v1/../v1/models",
        "/V1/models",
        "/v1/%6dodels",
        "/v1%2fmodels",
    ]
    tricks += [
        "/health/../v1/models",
        "/page/../v1/models",
        "/page/..%2fv1/models",
        "/v1/models%2f",
        "/%76%31/models",
        "/v1/v1/v1/models",
    ]
    async with rig(api_keys=["secret"], root_path=root) as r:
        for path in [*tricks, *(root + trick for trick in tricks)]:
            async with r.http.get(URL(f"{r.url}{path}", encoded=True)) as response:
                assert response.status in (401, 404), path


async def test_the_official_client_behind_a_root_path(rig) -> None:
    async with rig(api_keys=["secret"], root_path="/v1") as r:
        for base in ("/v1", "/v1/v1"):
            for key, works in (("secret", True), ("wrong", False)):
                async with openai.AsyncOpenAI(base_url=r.url + base, api_key=key, max_retries=0) as client:
                    if works:
                        assert (await client.models.list()).data[0].id == "tiny"
                    else:
                        with pytest.raises(openai.AuthenticationError):
                            await client.models.list()


async def test_operations_ask_for_the_admin_key(rig) -> None:
    async with rig(api_keys=["user"], admin_keys=["root", "other"]) as r:
        for path in OPERATIONS:
            assert (await r.post(path, {}))[0] == 401
            assert (await r.post(path, {}, headers=bearer("user")))[0] == 401
            assert (await r.post(path, {}, headers=bearer("other")))[0] == 200
        for path in ("/is_sleeping", "/v1/models"):
            for key, status in (("user", 200), ("root", 200), ("neither", 401)):
                async with r.http.get(path, headers=bearer(key)) as response:
                    assert response.status == status
        await r.post("/v1/completions", ASKS, headers=bearer("root"))
        assert r.ring.frames(Generate)[0].tenant == "admin"
    async with rig(admin_keys=["root"]) as r:  # clients need no key
        assert (await r.post("/v1/completions", ASKS))[0] == 200
        assert (await r.post("/pause", {}))[0] == 401


async def test_a_key_file_names_tenants_and_is_read_again(rig, tmp_path: Path, caplog: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("ann 1111\n2222\n")
    async with rig(api_keys=["0000"], api_key_file=str(file)) as r:

        async def tenant(key: str) -> str | None:
            """None: the key is refused."""
            r.ring.sent.clear()
            status, _ = await r.post("/v1/completions", ASKS, headers=bearer(key))
            assert status in (200, 401)
            return r.ring.frames(Generate)[0].tenant if status == 200 else None

        assert [await tenant(key) for key in ("0000", "1111", "2222", "3333")] == ["key-0", "ann", "key-2", None]
        file.write_text("bob 3333\nann 1111\n")
        r.server.reload_keys()
        assert [await tenant(key) for key in ("0000", "1111", "2222", "3333")] == ["key-0", "ann", None, "bob"]
        for broken in ("", "a b c", None):
            caplog.clear()
            file.unlink() if broken is None else file.write_text(broken)
            r.server.reload_keys()
            assert [await tenant(key) for key in ("1111", "2222", "")] == ["ann", None, None]
            assert [f"--api-key-file {file}" in each.getMessage() for each in caplog.records] == [True]


async def test_a_key_file_that_cannot_be_used_ends_the_start(rig, tmp_path: Path) -> None:
    """Otherwise a gateway that starts again would need no key."""
    with pytest.raises(ConfigError, match="holds no key"):
        file = tmp_path / "keys"
        file.write_text("")
        async with rig(api_key_file=str(file)):
            pass


def outer_address() -> str:
    """An address of this machine other than the loopback one, or an empty string."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


async def test_without_any_key_only_this_machine_may_use_operations(rig) -> None:
    forged = [{"X-Forwarded-For": "127.0.0.1"}, {"Forwarded": "for=127.0.0.1"}, {"X-Real-IP": "127.0.0.1"}]
    pages = [{"Origin": "https://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1.evil.example"}]
    async with rig(host="") as r:
        for path in OPERATIONS:
            assert (await r.post(path, {}))[0] == 200
            for headers in [*forged, *pages]:
                assert (await r.post(path, {}, headers=headers))[0] == 403, headers
        assert (await r.post("/pause", {}, headers={"Origin": "http://localhost:3000"}))[0] == 200
        if address := outer_address():
            url = f"http://{address}:{r.port}"
            async with aiohttp.ClientSession(url) as http:
                for headers in ({}, *forged):
                    async with http.post("/pause", headers=headers) as response:
                        assert response.status == 403
                        assert "--admin-key" in (await response.json())["error"]["message"]
                async with http.post("/v1/completions", json=ASKS) as response:
                    assert response.status == 200


async def test_a_unix_socket_is_this_machine(rig, tmp_path: Path) -> None:
    async with rig() as r, contextlib.AsyncExitStack() as stack:
        runner = BoundedRunner(build_app(r.gateway_config, r.gateway, Guard([], [])), 10, handler_cancellation=True)
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        await web.UnixSite(runner, tmp_path / "s").start()
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(tmp_path / "s"))) as http:
            async with http.post("http://x/pause") as response:
                assert response.status == 200
            async with http.post("http://x/pause", headers={"X-Forwarded-For": "127.0.0.1"}) as response:
                assert response.status == 403


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("[::1]", True),
        ("[::ffff:127.0.0.1]", True),
        ("localhost", True),
        ("app.localhost", True),
        ("10.0.0.1", False),
        ("[::ffff:10.0.0.1]", False),
        ("0.0.0.0", False),
        ("localhost.evil.example", False),
        ("", False),
    ],
)
def test_loopback_addresses(host: str, local: bool) -> None:
    """Of peers, and of web pages in a browser of this machine."""
    for peer, headers in ((host.strip("[]"), {}), ("127.0.0.1", {"Origin": f"http://{host}"})):
        transport = SimpleNamespace(get_extra_info={"peername": (peer, 1)}.get)
        request = make_mocked_request("POST", "/pause", headers, transport=transport)
        with contextlib.nullcontext() if local else pytest.raises(RequestError):
            check_local(request)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("Application/JSON ; charset=utf-8", 200),
        ("text/plain", 415),
        ("text/plain;application/json", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/jsonp", 415),
    ],
)
async def test_a_body_of_another_type_is_a_415(rig, kind: str, status: int) -> None:
    async with rig() as r:
        for path in ("/v1/completions", "/pause"):
            answered, body = await r.post(path, ASKS, headers={"Content-Type": kind})
            assert answered == status, path
            assert status == 200 or body["error"]["code"] == "unsupported_media_type"
        assert status == 200 or not r.ring.frames(Control)


async def raw(r: Any, head: bytes) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
    writer.write(head.replace(b"\n", b"\r\n"))
    status = int((await reader.readline()).split()[1])
    writer.close()
    await writer.wait_closed()
    return status


async def test_a_body_without_a_type_is_a_415_and_an_operation_needs_no_body(rig) -> None:
    async with rig() as r:
        assert await raw(r, b"POST /v1/completions HTTP/1.1\nHost: x\nContent-Length: 2\n\n{}") == 415
        assert await raw(r, b"POST /pause HTTP/1.1\nHost: x\nContent-Length: 2\n\n{}") == 415
        assert await raw(r, b"POST /pause HTTP/1.1\nHost: x\n\n") == 200
        assert await raw(r, b"POST /resume HTTP/1.1\nHost: x\nContent-Length: 0\n\n") == 200
        assert await raw(r, b"POST /ping HTTP/1.1\nHost: x\n\n") == 200


async def test_a_key_of_any_bytes_is_a_401(rig) -> None:
    """Regression: this was a 500, because a header that is not UTF-8 cannot be encoded as UTF-8."""
    async with rig(api_keys=["sécret"]) as r:
        for value in (b"Bearer \xff\xfe", b"Bearer \xc3", b"\xff", b"Bearer", b"Bearer  ", "Bearer s€cret".encode()):
            assert await raw(r, b"GET /v1/models HTTP/1.1\nHost: x\nAuthorization: " + value + b"\n\n") == 401
        right = b"GET /v1/models HTTP/1.1\nHost: x\nAuthorization: Bearer " + "sécret".encode() + b"\n\n"
        assert await raw(r, right) == 200


async def test_the_page_runs_only_its_own_scripts_and_in_no_frame(rig) -> None:
    async with rig() as r:
        for path in ("/", "/page/playground.js"):
            async with r.http.get(path) as response:
                policy = response.headers["Content-Security-Policy"].split("; ")
                assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"} <= {*policy}
                assert response.headers["X-Frame-Options"] == "DENY"
                assert response.headers["X-Content-Type-Options"] == "nosniff"

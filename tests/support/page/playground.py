"""What tests of the playground share: a fake gateway with canned answers, and a user's actions in Chromium."""

import http.server
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

PAGE = Path(__file__).parents[3] / "services" / "api_gateway" / "page"
PATIENCE_S = 20
QUESTION = "Write a function that reads a file and returns its lines."  # the demo model has a long answer to it
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
ROLES = ("api_gateway", "tokenizer_pool", "scheduler", "gpu_worker", "detokenizer")
STATS = {"running": 3, "waiting": 0, "requests_total": 12, "output_tokens_total": 90, "rss_bytes": 212_000_000}


class FakeGateway(http.server.ThreadingHTTPServer):
    """Serves the page at / and, as behind a --root-path, at /proxied/."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[dict[str, Any]] = []
        self.seen: list[tuple[str, str | None]] = []  # path, key
        self.tokens = 0
        self.hung_up = threading.Event()  # a reader left in mid-stream
        self.ring_down = False

    def ring(self) -> dict[str, Any]:
        members: list[dict[str, Any]] = [
            {"name": f"{role}-0", "role": role, "ready": True, "phase": "ready", "model": "demo", "stats": STATS}
            for role in ROLES
        ]
        members[3] |= {"incarnation": "a", "kv_role": "prefill", "sends_to": ["b"]}
        members.append(members[3] | {"name": "gpu_worker-1", "ready": False, "phase": "loading weights"})
        members[5] |= {"incarnation": "b", "kv_role": "decode", "sends_to": []}
        totals = {"requests_total": len(self.requests), "output_tokens_total": self.tokens, "blocks_used": 1024}
        return {"members": members, "totals": totals | {"blocks_total": 4096, "running": 3, "waiting": 2}}


class Handler(http.server.BaseHTTPRequestHandler):
    server: FakeGateway

    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers["Authorization"]))
        path = self.path.removeprefix("/proxied")
        if path == "/v1/models":
            self.answer(200, {"data": [{"id": "demo", "max_model_len": 4096}]})
        elif path == "/ring" and not self.server.ring_down:
            self.answer(200, self.server.ring())
        else:
            file = PAGE / ("index.html" if path == "/" else path.removeprefix("/page/"))
            found = path != "/ring" and file.is_file()
            self.answer(200 if found else 404, file.read_bytes() if found else b"", TYPES.get(file.suffix, ""))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        self.server.seen.append((self.path, self.headers["Authorization"]))
        if body.get("temperature", 0) > 100:
            error = {"message": "temperature must be at most 100", "type": "invalid_request_error"}
            self.answer(400, {"error": error | {"param": "temperature", "code": 400}})
            return
        self.answer(200, b": a comment\r\n\r\n", "text/event-stream")
        try:
            self.stream(body)
        except (BrokenPipeError, ConnectionResetError):
            self.server.hung_up.set()

    def stream(self, body: dict[str, Any]) -> None:
        chat = "messages" in body
        if body.get("tools") and body["messages"][-1]["role"] != "tool":
            self.stream_calls(bool(body.get("logprobs")))
            return
        asked = body["messages"][-1]["content"] if chat else body["prompt"]
        words = ["Hé", "llo", " <b>", "yard", "</b>", "\n"] * (1000 if "endless" in asked else 4)
        for i, word in enumerate(words):
            time.sleep(0.03)
            self.server.tokens += 1
            if i == 5 and "break" in asked:
                self.event({"error": {"message": "the worker died twice on this request", "code": 500}})
                return
            self.event({"choices": [chunk(word, -0.02 if i % 2 else -3.0, chat, bool(body.get("logprobs")))]})
        self.event({"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "stop"}]})
        self.event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": len(words)}})
        self.wfile.write(b"data: [DONE]\n\n")

    def stream_calls(self, wanted: bool) -> None:
        """Reasoning, and two calls whose arguments arrive in pieces; what surrounds them are tokens only."""
        deltas: list[tuple[str, dict[str, Any]]] = [
            (word, {"reasoning": word, "reasoning_content": word}) for word in ("I <b>", "look.")
        ]
        for i, name in enumerate(("search", "note")):
            kind = "custom" if name == "note" else "function"
            key = "input" if name == "note" else "arguments"
            begun = {"index": i, "id": f"call_{i}", "type": kind, kind: {"name": name, key: ""}}
            deltas += [("<tool_call>", {}), (name, {}), ("", {"tool_calls": [begun]})]
            *more, end = [{"index": i, kind: {key: piece}} for piece in ('{"q": ', '"Hé"', "}")]
            deltas += [(piece[kind][key], {"tool_calls": [piece]}) for piece in more]
            deltas += [("", {"tool_calls": [end]}), ("}}", {})]  # the last token comes behind its text and has more
        for word, delta in deltas:
            time.sleep(0.03)
            logprobs = chunk(word, -0.5, True, wanted and word != "")["logprobs"]
            self.event({"choices": [{"index": 0, "delta": delta, "logprobs": logprobs}]})
        self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
        usage = {"completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 3}}
        self.event({"choices": [], "usage": {"prompt_tokens": 7} | usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, value: dict[str, Any]) -> None:
        data = f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()
        cut = data.find("é".encode()) + 1 or 25  # splits a character or a line
        self.wfile.write(data[:cut])
        time.sleep(0.005)
        self.wfile.write(data[cut:])

    def answer(self, status: int, body: bytes | dict[str, Any], kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode() if isinstance(body, dict) else body)

    def log_message(self, *_: object) -> None:
        pass


def chunk(word: str, logprob: float, chat: bool, wanted: bool) -> dict[str, Any]:
    top = [{"token": word, "logprob": logprob}, {"token": " other", "logprob": -2.5}]
    logprobs: Any = {"content": [top[0] | {"bytes": list(word.encode()), "top_logprobs": top}]}
    if not chat:
        logprobs = {"tokens": [word], "token_logprobs": [logprob], "top_logprobs": [{word: logprob, " other": -2.5}]}
    return {"index": 0, "delta": {"content": word}, "text": word, "logprobs": logprobs if wanted else None}


class Page:
    """A user's actions on the page, and its content."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        driver.get(url)
        self.until(lambda: self.one("#model").is_enabled(), "the model list")

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """Text of all matching elements, as it is in the document."""
        script = "return [...document.querySelectorAll(arguments[0])].map((found) => found.textContent).join('\\n')"
        return str(self.driver.execute_script(script, selector))

    def until(self, seen: Callable[[], Any], what: str) -> Any:
        wait = WebDriverWait(self.driver, PATIENCE_S, 0.05, (WebDriverException,))  # elements are replaced at any time
        return wait.until(lambda _: seen(), f"never saw {what}")

    def ask(self, text: str, pane: str = "chat") -> None:
        self.one(f"#{pane}-input").send_keys(text, Keys.ENTER)

    def set(self, name: str, value: str) -> None:
        self.one(f"#p-{name}").send_keys(Keys.CONTROL, "a", Keys.NULL, value)

    def finished(self, answers: int = 1) -> None:
        self.until(lambda: len(self.all(".answer:not(.streaming)")) == answers, "the end of the answer")


def no_faults(browser: webdriver.Chrome) -> None:
    faults = [entry["message"] for entry in browser.get_log("browser") if entry["source"] != "network"]
    browser.get("about:blank")
    assert not faults

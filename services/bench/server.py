"""Queries the server before the run: its models and its token counts. Blocking, since nothing is timed yet."""

import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from blockyard.services.bench.load.client import Endpoint
from blockyard.services.bench.load.results import BenchError, error_text
from blockyard.shared.errors import ConfigError

ANSWER_S = 30.0
PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "embeddings": "/v1/embeddings",
    "rerank": "/rerank",
}
T = TypeVar("T")


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokens(msgspec.Struct):
    count: int


class _Asked(msgspec.Struct):
    model: str
    prompt: str


@dataclass(frozen=True, slots=True)
class OpenAIServer:
    """An OpenAI-compatible server. `base_url` has no /v1 and no trailing slash."""

    base_url: str
    headers: Mapping[str, str]

    def first_model(self) -> str:
        """Raises BenchError."""
        found = self._ask("/v1/models", None, _Models).data
        if not found:
            raise BenchError(f"{self.base_url} lists no model; name one with --model")
        return found[0].id

    def num_tokens(self, model: str, text: str) -> int:
        """Counts tokens with /tokenize, which is not part of OpenAI's protocol. Raises BenchError."""
        return self._ask("/tokenize", _Asked(model, text), _Tokens).count

    def endpoint(self, endpoint: str) -> Endpoint:
        parts = urlsplit(self.base_url)
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        return Endpoint(parts.hostname or "", port, tls, parts.path + PATHS[endpoint], tuple(self.headers.items()))

    def _ask(self, path: str, body: _Asked | None, answer: type[T]) -> T:
        data = None if body is None else msgspec.json.encode(body)
        request = urllib.request.Request(
            self.base_url + path, data, {**self.headers, "Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
                return msgspec.json.decode(reply.read(), type=answer)
        except urllib.error.HTTPError as e:
            with e:
                raise BenchError(f"{self.base_url}{path}: HTTP {e.code}: {error_text(e.read())}") from None
        except OSError as e:
            raise BenchError(f"{self.base_url}{path}: {getattr(e, 'reason', None) or e}") from None
        except msgspec.DecodeError as e:
            raise BenchError(f"{self.base_url}{path}: unexpected response: {e}") from None


def find(base_url: str, api_key: str | None) -> OpenAIServer:
    """Raises ConfigError if `base_url` is not an HTTP URL."""
    url = base_url.rstrip("/").removesuffix("/v1")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--base-url {base_url}: expected http://HOST:PORT")
    key = api_key or os.environ.get("OPENAI_API_KEY")
    return OpenAIServer(url, {"Authorization": f"Bearer {key}"} if key else {})

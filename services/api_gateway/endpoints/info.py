"""How the server is set up: the flags that it was started with, and the tokenizers of its models."""

import os
import platform
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
from aiohttp import web

from blockyard.services.api_gateway.http.access import Access, Route
from blockyard.services.api_gateway.http.request_context import TENANT
from blockyard.services.api_gateway.request_pipeline import RequestPipeline
from blockyard.services.api_gateway.responses.json_response import JSON, json_response
from blockyard.shared.errors import RequestError

FORMATS = ("text", "json")
SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")  # in the names of variables that are left out
PREFIXES = ("BLOCKYARD_", "CUDA_VISIBLE", "HF_H", "OMP_")


class ServerInfo(msgspec.Struct, frozen=True):
    """In vLLM's names."""

    vllm_config: str | dict[str, Any]
    vllm_env: dict[str, str]
    system_env: dict[str, str]


class InfoEndpoints:
    """`settings`: JSON object of the flags without secrets, written at the start."""

    def __init__(self, pipeline: RequestPipeline, version: str, settings: str) -> None:
        self._pipeline, self._version = pipeline, version
        self._settings: dict[str, Any] = msgspec.json.decode(settings)

    def routes(self) -> Iterator[Route]:
        yield Route("GET", "/server_info", self.server_info, Access.OPERATOR)

    async def server_info(self, request: web.Request) -> web.Response:
        """The settled flags, without secrets, and the models; `config_format` is text or json."""
        form = request.query.get("config_format", "text")
        if form not in FORMATS:
            raise RequestError(f"config_format must be text or json, got {form[:40]!r}", "config_format")
        models = [
            {"names": card.names, "max_model_len": card.max_model_len, "vocab_size": card.vocab_size}
            for card in self._pipeline.schedulers.cards()
        ]
        config = {"models": models, **self._settings}
        shown = config if form == "json" else ", ".join(f"{name}={value!r}" for name, value in config.items())
        return json_response(ServerInfo(shown, _variables(), self._system()))

    def _system(self) -> dict[str, str]:
        return {
            "version": self._version,
            "python": sys.version.partition(" ")[0],
            "platform": platform.platform(),
            "machine": platform.machine(),
            "num_cores": str(os.cpu_count()),
        }


class TokenizerInfoEndpoints:
    """The route of --enable-tokenizer-info-endpoint."""

    def __init__(self, pipeline: RequestPipeline) -> None:
        self._pipeline = pipeline

    def routes(self) -> Iterator[Route]:
        yield Route("GET", "/tokenizer_info", self.tokenizer_info, Access.KEY)

    async def tokenizer_info(self, request: web.Request) -> web.Response:
        """The settings of a model's tokenizer, with its chat template; `model` names one of several models."""
        card = self._pipeline.schedulers.card(request.query.get("model"))
        return web.Response(
            body=await self._pipeline.tokenizer_settings(card.names[0], TENANT.get()), content_type=JSON
        )


def _variables() -> dict[str, str]:
    """Variables of the environment that change what this server does."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIXES) and not any(word in name for word in SECRETS)
    }

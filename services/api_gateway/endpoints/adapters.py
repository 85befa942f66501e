"""Endpoints for operators: load and unload LoRA adapters."""

from collections.abc import Iterator

import msgspec
from aiohttp import web

from blockyard.services.api_gateway.adapter_folders import MAX_NAME_CHARS, find_folder
from blockyard.services.api_gateway.http.access import Access, Route
from blockyard.services.api_gateway.http.uploads import Uploads
from blockyard.services.api_gateway.requests.schemas import decode
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Control, ControlVerb
from blockyard.shared.ring_client.controls import ControlClient


class LoadAdapterRequest(msgspec.Struct, frozen=True):
    lora_name: str  # what requests name as their model
    lora_path: str  # of the folder, below --lora-dir
    load_inplace: bool = False  # the name may be in use; running requests finish with the adapter that they have


class UnloadAdapterRequest(msgspec.Struct, frozen=True):
    lora_name: str
    lora_int_id: int | None = None  # vLLM's number; the name alone counts


class AdapterEndpoints:
    def __init__(self, controls: ControlClient, uploads: Uploads, lora_dir: str) -> None:
        """lora_dir: below which adapters are loaded; empty: none are."""
        self._controls, self._uploads, self._lora_dir = controls, uploads, lora_dir

    def routes(self) -> Iterator[Route]:
        yield Route("POST", "/v1/load_lora_adapter", self.load, Access.OPERATOR)
        yield Route("POST", "/v1/unload_lora_adapter", self.unload, Access.OPERATOR)

    async def load(self, request: web.Request) -> web.Response:
        """Loads a LoRA adapter from a folder below `--lora-dir`; it is then a model that requests may name."""
        async with self._uploads.read(request) as body:
            asked, _ = decode(body, LoadAdapterRequest, strict=True)
        name = _checked_name(asked.lora_name)
        path = str(find_folder(asked.lora_path, self._lora_dir))
        verb = ControlVerb.LOAD_ADAPTER
        await self._controls.ask(Control("", verb, adapter=name, adapter_path=path, replace=asked.load_inplace))
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: web.Request) -> web.Response:
        """Unloads a LoRA adapter: new requests for it are refused, and the answer is sent once running ones ended."""
        async with self._uploads.read(request) as body:
            asked, _ = decode(body, UnloadAdapterRequest, strict=True)
        name = _checked_name(asked.lora_name)
        await self._controls.ask(Control("", ControlVerb.UNLOAD_ADAPTER, adapter=name))
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


def _checked_name(name: str) -> str:
    if not name.strip() or len(name) > MAX_NAME_CHARS:
        raise RequestError(f"lora_name has 1 to {MAX_NAME_CHARS} characters, got {len(name)}", "lora_name")
    if not name.isprintable():  # it is written to logs and to metrics
        raise RequestError(f"lora_name {name!r} has characters that cannot be printed", "lora_name")
    return name

"""Endpoints for operators: load and unload adapters."""

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

PROMPT = "prompt_adapter"


class LoadAdapterRequest(msgspec.Struct, frozen=True):
    lora_name: str  # what requests name as their model
    lora_path: str  # of the folder, below --lora-dir
    load_inplace: bool = False  # the name may be in use; running requests finish with the adapter that they have


class UnloadAdapterRequest(msgspec.Struct, frozen=True):
    lora_name: str
    lora_int_id: int | None = None  # vLLM's number; the name alone counts


class LoadPromptAdapterRequest(msgspec.Struct, frozen=True):
    prompt_adapter_name: str  # what requests name as their model
    prompt_adapter_path: str  # of the folder, below --lora-dir
    load_inplace: bool = False  # as of a LoRA adapter


class UnloadPromptAdapterRequest(msgspec.Struct, frozen=True):
    prompt_adapter_name: str


class AdapterEndpoints:
    def __init__(self, controls: ControlClient, uploads: Uploads, lora_dir: str) -> None:
        """lora_dir: below which adapters are loaded; empty: none are."""
        self._controls, self._uploads, self._lora_dir = controls, uploads, lora_dir

    def routes(self) -> Iterator[Route]:
        yield Route("POST", "/v1/load_lora_adapter", self.load, Access.OPERATOR)
        yield Route("POST", "/v1/unload_lora_adapter", self.unload, Access.OPERATOR)
        yield Route("POST", "/v1/load_prompt_adapter", self.load_prompt, Access.OPERATOR)
        yield Route("POST", "/v1/unload_prompt_adapter", self.unload_prompt, Access.OPERATOR)

    async def load(self, request: web.Request) -> web.Response:
        """Loads a LoRA adapter from a folder below `--lora-dir`; it is then a model that requests may name."""
        async with self._uploads.read(request) as body:
            asked, _ = decode(body, LoadAdapterRequest, strict=True)
        await self._load("lora", asked.lora_name, asked.lora_path, asked.load_inplace)
        return web.Response(text=f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    async def unload(self, request: web.Request) -> web.Response:
        """Unloads a LoRA adapter: new requests for it are refused, and the answer is sent once running ones ended."""
        async with self._uploads.read(request) as body:
            asked, _ = decode(body, UnloadAdapterRequest, strict=True)
        await self._unload("lora", asked.lora_name)
        return web.Response(text=f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")

    async def load_prompt(self, request: web.Request) -> web.Response:
        """Loads a prompt adapter from a folder below `--lora-dir`; it is then a model that requests may name."""
        async with self._uploads.read(request) as body:
            asked, _ = decode(body, LoadPromptAdapterRequest, strict=True)
        await self._load(PROMPT, asked.prompt_adapter_name, asked.prompt_adapter_path, asked.load_inplace)
        return web.Response(text=f"Success: prompt adapter '{asked.prompt_adapter_name}' added successfully.")

    async def unload_prompt(self, request: web.Request) -> web.Response:
        """Unloads a prompt adapter, as a LoRA adapter is unloaded."""
        async with self._uploads.read(request) as body:
            asked, _ = decode(body, UnloadPromptAdapterRequest, strict=True)
        await self._unload(PROMPT, asked.prompt_adapter_name)
        return web.Response(text=f"Success: prompt adapter '{asked.prompt_adapter_name}' removed successfully.")

    async def _load(self, kind: str, name: str, path: str, replace: bool) -> None:
        """kind: of adapters, with which the names of fields begin."""
        _check_name(name, f"{kind}_name")
        folder = str(find_folder(path, self._lora_dir, f"{kind}_path"))
        verb, is_prompt = ControlVerb.LOAD_ADAPTER, kind == PROMPT
        command = Control("", verb, adapter=name, adapter_path=folder, replace=replace, is_prompt=is_prompt)
        await self._controls.ask(command)

    async def _unload(self, kind: str, name: str) -> None:
        _check_name(name, f"{kind}_name")
        await self._controls.ask(Control("", ControlVerb.UNLOAD_ADAPTER, adapter=name, is_prompt=kind == PROMPT))


def _check_name(name: str, field: str) -> None:
    if not name.strip() or len(name) > MAX_NAME_CHARS:
        raise RequestError(f"{field} has 1 to {MAX_NAME_CHARS} characters, got {len(name)}", field)
    if not name.isprintable():  # it is written to logs and to metrics
        raise RequestError(f"{field} {name!r} has characters that cannot be printed", field)

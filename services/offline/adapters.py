"""Adapters of offline calls: each request may have one of LoRA and one of prompts, loaded when first asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from blockyard.services.offline.batch import Adapters, OfflineRequest
from blockyard.services.offline.session import Session
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import AdapterCard, Control, ControlVerb
from blockyard.shared.ring_client.client import RingClient

LORA, PROMPT = "lora", "prompt_adapter"  # with which vLLM's names of arguments and fields begin


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by its name, as vLLM's. Under another `lora_int_id` than before its folder is read again."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False  # the folder is read again

    def __post_init__(self) -> None:
        _check(LORA, self.lora_name, "lora_int_id", self.lora_int_id)


@dataclass(frozen=True, slots=True)
class PromptAdapterRequest:
    """A prompt adapter by its name, as vLLM's. Under another id than before its folder is read again, which says how
    many tokens it has."""

    prompt_adapter_name: str
    prompt_adapter_id: int = 1
    prompt_adapter_local_path: str = ""
    prompt_adapter_num_virtual_tokens: int | None = None

    def __post_init__(self) -> None:
        _check(PROMPT, self.prompt_adapter_name, "prompt_adapter_id", self.prompt_adapter_id)


# of all prompts, or one for each
LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
PromptAdapterRequests = PromptAdapterRequest | Sequence[PromptAdapterRequest | None] | None
Asked = TypeVar("Asked", LoRARequest, PromptAdapterRequest)


@dataclass(frozen=True, slots=True)
class AskedAdapters:
    """What each prompt of a call is to have. The names and folders are checked, and nothing is loaded."""

    of_lora: Sequence[LoRARequest | None]
    of_prompts: Sequence[PromptAdapterRequest | None]

    def load(self, session: Session) -> list[Adapters]:
        """Returns the adapters of each prompt, loaded. Raises RequestError."""
        loaded: dict[LoRARequest | PromptAdapterRequest, AdapterCard] = {}
        for one in dict.fromkeys(one for one in self.of_lora if one is not None):
            columns = LORA, one.lora_name, one.lora_path, "lora_path", one.lora_int_id
            loaded[one] = _load(session, *columns, reads_again=one.load_inplace)
        for other in dict.fromkeys(one for one in self.of_prompts if one is not None):
            path = other.prompt_adapter_local_path
            name, number = other.prompt_adapter_name, other.prompt_adapter_id
            loaded[other] = _load(session, PROMPT, name, path, "prompt_adapter_local_path", number)
        pairs = zip(self.of_lora, self.of_prompts, strict=True)
        return [tuple(loaded[one] for one in pair if one is not None) for pair in pairs]

    def load_for(self, session: Session, requests: list[OfflineRequest]) -> list[OfflineRequest]:
        """Returns the requests with their adapters, loaded. Raises RequestError."""
        return [replace(one, adapters=own) for one, own in zip(requests, self.load(session), strict=True)]


def ask_adapters(lora: LoRARequests, num_prompts: int, prompt: PromptAdapterRequests = None) -> AskedAdapters:
    """Reads the arguments of a call. Raises RequestError."""
    of_lora = _each(LoRARequest, f"{LORA}_request", lora, num_prompts)
    of_prompts = _each(PromptAdapterRequest, f"{PROMPT}_request", prompt, num_prompts)
    named = [(LORA, one.lora_name, one.lora_path) for one in of_lora if one is not None]
    named += [(PROMPT, one.prompt_adapter_name, one.prompt_adapter_local_path) for one in of_prompts if one is not None]
    _check_names(named)
    return AskedAdapters(of_lora, of_prompts)


def read_adapters(
    session: Session, lora: LoRARequests, num_prompts: int, prompt: PromptAdapterRequests = None
) -> list[Adapters]:
    """Returns the adapters of each prompt, loaded. Raises RequestError."""
    return ask_adapters(lora, num_prompts, prompt).load(session)


def _check(kind: str, name: str, id_field: str, number: int) -> None:
    if not name:
        raise RequestError(f"{kind}_name is empty", f"{kind}_request")
    if number < 1:
        raise RequestError(f"{id_field} must be at least 1, got {number}", f"{kind}_request")


def _check_names(named: Sequence[tuple[str, str, str]]) -> None:
    """Raises RequestError if a name is that of two adapters: the last one would be loaded in place of the others.

    named: kind, name and path of each; an empty path is that of the adapter which has the name.
    """
    kinds: dict[str, str] = {}
    folders: dict[str, str] = {}
    for kind, name, path in dict.fromkeys(named):
        if kinds.setdefault(name, kind) != kind:
            raise RequestError(f"{name!r} is the name of a LoRA adapter and of a prompt adapter", f"{kind}_request")
        folder = _folder(path)
        if folder and (other := folders.setdefault(name, folder)) != folder:
            raise RequestError(f"{name!r} is the name of two adapters, {other} and {folder}", f"{kind}_request")


def _folder(path: str) -> str:
    return str(Path(path).expanduser().resolve()) if path else ""


def _each(
    kind: type[Asked], argument: str, asked: Asked | Sequence[Asked | None] | None, num_prompts: int
) -> Sequence[Asked | None]:
    """What is asked for of each prompt. Raises RequestError."""
    if asked is None:
        return [None] * num_prompts
    each = [asked] * num_prompts if isinstance(asked, kind) else asked
    if not isinstance(each, list | tuple) or not all(one is None or isinstance(one, kind) for one in each):
        raise RequestError(f"{argument} must be a {kind.__name__} or a list of them, got {asked!r}", argument)
    if len(each) != num_prompts:
        raise RequestError(f"{len(each)} {argument}s for {num_prompts} prompts", argument)
    return each


def _load(
    session: Session, kind: str, name: str, path: str, path_field: str, number: int, *, reads_again: bool = False
) -> AdapterCard:
    """number: the caller's, of these bytes. reads_again: also if the folder is loaded under this number."""
    model, field, is_prompt = session.card.names[0], f"{kind}_request", kind == PROMPT
    folder = _folder(path)

    async def load(client: RingClient) -> AdapterCard:
        found = _named(client, model, name)
        if found is None and not folder:
            raise RequestError(f"the adapter {name!r} is not loaded, and {path_field} is empty", field, 404)
        if found is not None and not folder and found.is_prompt != is_prompt:
            raise RequestError(f"{name!r} is {'no' if is_prompt else 'a'} prompt adapter", field)
        is_other = reads_again or session.adapter_numbers.get(name, number) != number
        if found is None or (folder and (is_other or folder != found.root or found.is_prompt != is_prompt)):
            verb = ControlVerb.LOAD_ADAPTER
            control = Control("", verb, adapter=name, adapter_path=folder, replace=True, is_prompt=is_prompt)
            await client.controls.ask(control)
            found = _named(client, model, name)
        assert found is not None, "the answer to a load has the adapter"
        session.adapter_numbers[name] = number
        return found

    return session.call(load)


def _named(client: RingClient, model: str, name: str) -> AdapterCard | None:
    return next((one for one in client.schedulers.card(model).adapters if one.name == name), None)

"""Loads the adapters of offline calls when they are first asked for, and unloads them by their numbers."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from blockyard.services.offline.adapters.requests import LORA, PROMPT, Adapters, LoRARequest, PromptAdapterRequest
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import AdapterCard, Control, ControlVerb, ModelCard
from blockyard.shared.ring_client.client import RingClient

T = TypeVar("T")


class AdapterSession(Protocol):
    """What is used of a `Session`."""

    adapter_numbers: dict[str, int]

    @property
    def card(self) -> ModelCard: ...

    def call(self, work: Callable[[RingClient], Coroutine[Any, Any, T]]) -> T: ...


# of all prompts, or one for each
LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
PromptAdapterRequests = PromptAdapterRequest | Sequence[PromptAdapterRequest | None] | None
Asked = TypeVar("Asked", LoRARequest, PromptAdapterRequest)


@dataclass(frozen=True, slots=True)
class AskedAdapters:
    """What each prompt of a call is to have. The names and folders are checked, and nothing is loaded."""

    of_lora: Sequence[LoRARequest | None]
    of_prompts: Sequence[PromptAdapterRequest | None]

    def load(self, session: AdapterSession) -> list[Adapters]:
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
        return [Adapters(tuple(loaded[one] for one in pair if one is not None), pair[0]) for pair in pairs]


def ask_adapters(lora: LoRARequests, num_prompts: int, prompt: PromptAdapterRequests = None) -> AskedAdapters:
    """Reads the arguments of a call. Raises RequestError."""
    of_lora = _each(LoRARequest, f"{LORA}_request", lora, num_prompts)
    of_prompts = _each(PromptAdapterRequest, f"{PROMPT}_request", prompt, num_prompts)
    named = [(LORA, one.lora_name, one.lora_path) for one in of_lora if one is not None]
    named += [(PROMPT, one.prompt_adapter_name, one.prompt_adapter_local_path) for one in of_prompts if one is not None]
    _check_names(named)
    return AskedAdapters(of_lora, of_prompts)


def read_adapters(
    session: AdapterSession, lora: LoRARequests, num_prompts: int, prompt: PromptAdapterRequests = None
) -> list[Adapters]:
    """Returns the adapters of each prompt, loaded. Raises RequestError."""
    return ask_adapters(lora, num_prompts, prompt).load(session)


def list_loras(session: AdapterSession) -> set[int]:
    """The numbers of the loaded LoRA adapters that requests have given numbers."""

    async def numbers(client: RingClient) -> set[int]:
        return set(_numbered(session, client).values())

    return session.call(numbers)


def remove_lora(session: AdapterSession, number: int) -> bool:
    """Unloads the LoRA adapters of a number, once no request uses them. Returns whether there was one."""

    async def unload(client: RingClient) -> bool:
        names = [name for name, own in _numbered(session, client).items() if own == number]
        for name in names:
            await client.controls.ask(Control("", ControlVerb.UNLOAD_ADAPTER, adapter=name))
            session.adapter_numbers.pop(name, None)
        return bool(names)

    return session.call(unload)


def _numbered(session: AdapterSession, client: RingClient) -> dict[str, int]:
    """Numbers of the LoRA adapters that are served, by name."""
    served, numbers = client.schedulers.card(session.card.names[0]).adapters, session.adapter_numbers
    return {one.name: numbers[one.name] for one in served if not one.is_prompt and one.name in numbers}


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
    session: AdapterSession, kind: str, name: str, path: str, path_field: str, number: int, *, reads_again: bool = False
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

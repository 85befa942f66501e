"""LoRA adapters of offline calls: each request may have one, which is loaded when it is first asked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blockyard.services.offline.session import Session
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import AdapterCard, Control, ControlVerb
from blockyard.shared.ring_client.client import RingClient


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by its name, as vLLM's. `lora_int_id` has no effect: the name is what counts."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        if not self.lora_name:
            raise RequestError("lora_name is empty", "lora_request")
        if self.lora_int_id < 1:
            raise RequestError(f"lora_int_id must be at least 1, got {self.lora_int_id}", "lora_request")


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None  # of all prompts, or one for each


def read_adapters(session: Session, asked: LoRARequests, num_prompts: int) -> list[AdapterCard | None]:
    """Returns the adapter of each prompt, loaded. Raises RequestError."""
    if asked is None:
        return [None] * num_prompts
    each = [asked] * num_prompts if isinstance(asked, LoRARequest) else asked
    if not isinstance(each, list | tuple) or not all(isinstance(one, LoRARequest | None) for one in each):
        raise RequestError(f"lora_request must be a LoRARequest or a list of them, got {asked!r}", "lora_request")
    if len(each) != num_prompts:
        raise RequestError(f"{len(each)} lora_requests for {num_prompts} prompts", "lora_request")
    loaded = {one: _load(session, one) for one in dict.fromkeys(one for one in each if one is not None)}
    return [None if one is None else loaded[one] for one in each]


def _load(session: Session, asked: LoRARequest) -> AdapterCard:
    model, name, path = session.card.names[0], asked.lora_name, asked.lora_path
    folder = str(Path(path).expanduser().resolve()) if path else ""

    async def load(client: RingClient) -> AdapterCard:
        found = _named(client, model, name)
        if found is None and not folder:
            raise RequestError(f"the adapter {name!r} is not loaded, and lora_path is empty", "lora_request", 404)
        if found is None or (folder and folder != found.root):
            control = Control("", ControlVerb.LOAD_ADAPTER, adapter=name, adapter_path=folder, replace=True)
            await client.controls.ask(control)
            found = _named(client, model, name)
        assert found is not None, "the answer to a load has the adapter"
        return found

    return session.call(load)


def _named(client: RingClient, model: str, name: str) -> AdapterCard | None:
    return next((one for one in client.schedulers.card(model).adapters if one.name == name), None)

"""What callers name adapters by, with vLLM's names, and the adapters of one prompt once they are loaded."""

from dataclasses import dataclass

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import AdapterCard

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


@dataclass(frozen=True, slots=True)
class Adapters:
    """Those of one prompt, loaded."""

    cards: tuple[AdapterCard, ...] = ()  # one of a kind at most; none: the model itself
    lora_request: LoRARequest | None = None  # that asked for the LoRA adapter


NO_ADAPTERS = Adapters()


def _check(kind: str, name: str, id_field: str, number: int) -> None:
    if not name:
        raise RequestError(f"{kind}_name is empty", f"{kind}_request")
    if number < 1:
        raise RequestError(f"{id_field} must be at least 1, got {number}", f"{kind}_request")

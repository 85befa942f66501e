"""The adapters of both kinds that one worker has, as its session asks for them, and their reader."""

from collections.abc import Callable, Sequence

import torch

from blockyard.services.gpu_worker.interfaces import LoadedAdapter
from blockyard.services.gpu_worker.layers.long_rotations import LongRotations
from blockyard.services.gpu_worker.lora.ranks.leader_adapters import LeaderAdapters
from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits
from blockyard.services.gpu_worker.lora.read_prompt import PromptLimits
from blockyard.services.gpu_worker.lora.reader_client import AdapterReader
from blockyard.services.gpu_worker.lora.worker_adapters import WorkerAdapters
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.prompt_adapters.prompt_vectors import PromptVectors
from blockyard.shared.config.services.lora import LoraConfig, PromptConfig
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.messages import AdapterPlaced

MakeReader = Callable[[AdapterLimits, PromptLimits | None], AdapterReader]


def adapter_limits(config: LoraConfig | None, dtype: torch.dtype, tokenizer_path: str = "") -> AdapterLimits:
    """dtype: of the model. tokenizer_path: see `AdapterLimits`."""
    if config is None:
        return AdapterLimits(dtype=dtype)
    return AdapterLimits(
        dtype=dtype if config.dtype == "auto" else getattr(torch, config.dtype),
        max_rank=config.max_rank,
        with_bias=config.with_bias,
        max_rows=config.extra_vocab_size,
        target_modules=tuple(config.target_modules),
        with_experts=config.with_experts,
        fully_sharded=config.fully_sharded,
        tokenizer_path=tokenizer_path,
    )


def add_long_rotations(model: Model, config: LoraConfig | None, max_model_len: int) -> int:
    """Prepares a model for adapters of longer contexts. Returns the length of the longest sequence of all.

    Call it before `Model.prepare`, with that length. max_model_len: of sequences without such an adapter.
    """
    if config is None or not config.long_factors:
        return max_model_len
    longest, factors = max_model_len * max(config.long_factors), config.long_factors
    rotations = LongRotations(factors, max_model_len, longest, config.max_loras, model.table.device)
    model.adapter_rows.long_rotations = rotations
    return longest


def prompt_limits(config: PromptConfig | None, model: Model, max_model_len: int) -> PromptLimits | None:
    """What is taken of prompt adapters. max_model_len: a prompt has a token besides, and an output has one."""
    if config is None:
        return None
    embedding = model.adaptable.embedding  # a pipeline stage knows its width, without the table
    width = (model.embeddings()[0] if embedding is None else embedding.weight).shape[1]
    return PromptLimits(min(config.max_tokens, max_model_len - 2), width, model.table.dtype)


def start_reader(
    config: WorkerConfig, model: Model, max_model_len: int, make_reader: MakeReader
) -> AdapterReader | None:
    """Starts the reader of adapters, while weights are loaded. None: the worker serves none."""
    if config.lora is None and config.prompts is None:
        return None
    prompts = prompt_limits(config.prompts, model, max_model_len)
    tokenizer_path = config.tokenizer_path or config.model_path
    return make_reader(adapter_limits(config.lora, model.table.dtype, tokenizer_path), prompts)


def make_hosts(
    lora: WorkerAdapters | LeaderAdapters | None, config: WorkerConfig, reader: AdapterReader | None, model: Model
) -> "AdapterHosts | None":
    """reader: of both kinds; None: the worker serves neither."""
    if reader is None:
        return None
    table, serves_prompts = model.table, config.prompts is not None
    return AdapterHosts(lora, PromptVectors(reader, table.device, table.link) if serves_prompts else None)


class AdapterHosts:
    """Implements `AdapterHost`. The scheduler's numbers are of both kinds together."""

    def __init__(self, lora: WorkerAdapters | LeaderAdapters | None, prompts: PromptVectors | None) -> None:
        """None: the worker serves none of this kind."""
        self.lora, self.prompts = lora, prompts
        self._kinds = [kind for kind in (lora, prompts) if kind is not None]
        self._refused: list[LoadedAdapter] = []

    @property
    def is_loading(self) -> bool:
        return bool(self._refused) or any(kind.is_loading for kind in self._kinds)

    def load(self, adapter: int, path: str, *, is_prompt: bool = False) -> None:
        kind = self.prompts if is_prompt else self.lora
        if kind is None:
            what = "prompt adapters" if is_prompt else "LoRA adapters"
            self._refused.append(LoadedAdapter(adapter, error=f"this worker serves no {what}"))
        else:
            kind.load(adapter, path)

    def drop(self, adapter: int) -> None:
        for kind in self._kinds:
            kind.drop(adapter)

    def reset(self) -> None:
        self._refused.clear()
        for kind in self._kinds:
            kind.reset()

    def poll(self, *, is_idle: bool = False) -> list[LoadedAdapter]:
        refused, self._refused = self._refused, []
        return [*refused, *(done for kind in self._kinds for done in kind.poll(is_idle=is_idle))]

    def place(self, placed: Sequence[AdapterPlaced]) -> None:
        """Call it at the launch of the plan that places them."""
        assert self.lora is not None, "a place is given to an adapter that was read"
        self.lora.place(placed)

"""The sizes of a worker: what its KV memory must hold, and what the scheduler is told of model and memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockyard.services.gpu_worker.loading.hf_config import read_eos_ids
from blockyard.services.gpu_worker.memory import KVMemoryNeed, length_that_fits
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.models.stage_model import StageModel
from blockyard.services.gpu_worker.pooling.selection import modules_folder
from blockyard.shared.config.pooling.pooling_card import make_card
from blockyard.shared.config.pooling.pooling_choice import PoolingChoice
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.messages import Geometry, PoolingCard, PoolingTask


def card_of(config: WorkerConfig, choice: PoolingChoice, settings: dict[str, Any], geometry: Geometry) -> PoolingCard:
    """Returns what a decoder that pools serves."""
    task = PoolingTask(config.task) if config.task != "generate" else PoolingTask.EMBED
    return make_card(
        *(task, choice, settings, modules_folder(config), geometry.max_model_len),
        has_kv=True,
        has_pair_template=config.has_pair_template,
    )


def need_of(model: Model, config: WorkerConfig, max_model_len: int, kv_block_bytes: int) -> KVMemoryNeed:
    return KVMemoryNeed(
        block_size=config.block_size,
        block_bytes=kv_block_bytes,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        window=window_of(model.shape.windows, max_model_len),
        max_step_tokens=config.max_num_batched_tokens,
        batch_invariant=config.batch_invariant,
        shorten=config.fit_max_model_len,
    )


def eos_ids_of(folder: Path, settings: dict[str, Any], vocab_size: int) -> list[int]:
    """Returns the end-of-sequence ids that are inside the vocabulary."""
    return [i for i in read_eos_ids(folder, settings) if 0 <= i < vocab_size]


def geometry_of(
    model: Model, eos_ids: list[int], config: WorkerConfig, need: KVMemoryNeed, num_blocks: int, num_host_blocks: int
) -> Geometry:
    """Returns the sizes and limits of the worker that are sent to the scheduler."""
    max_model_len = length_that_fits(need, num_blocks)
    return Geometry(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        vocab_size=model.shape.vocab_size,
        eos_token_ids=eos_ids,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_host_blocks=num_host_blocks,
        window=window_of(model.shape.windows, max_model_len),
        num_adapter_places=0 if config.lora is None else config.lora.max_loras,
        num_host_adapters=0 if config.lora is None else config.lora.max_cpu_loras,
        num_stages=config.pipeline_parallel_size,
        balanced_context=model.balanced_context() if isinstance(model, StageModel) else 0,
        num_prompt_adapters=0 if config.prompts is None else config.prompts.max_adapters,
        num_extra_tokens=0 if config.lora is None else config.lora.extra_vocab_size,
        base_len=0 if not config.long_factors else min(max_model_len, need.max_model_len // max(config.long_factors)),
    )


def window_of(windows: Sequence[int | None], max_model_len: int) -> int | None:
    """Returns the largest sliding window of all layers, or None if a layer attends to all tokens."""
    most = [max_model_len if window is None else window for window in windows]
    return max(most) if most and max(most) < max_model_len else None

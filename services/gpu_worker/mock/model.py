"""Sizes of the model that a mock worker stands in for, from config.json if there is one."""

from pathlib import Path

import msgspec

from blockyard.services.gpu_worker.mock.batch import Pattern
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.config.pooling.activations import num_labels
from blockyard.shared.config.pooling.pooling_fields import has_kv
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import LoadError
from blockyard.shared.json_objects import decode_object
from blockyard.shared.messages import Geometry, PoolingCard, PoolingTask

DEFAULT_VOCAB = 32000
DEFAULT_WIDTH = 64  # of vectors


class _ModelConfig(msgspec.Struct):
    vocab_size: bounds.Vocabulary = DEFAULT_VOCAB
    max_position_embeddings: bounds.Positions | None = None
    eos_token_id: int | list[int] | None = None
    hidden_size: bounds.Width = DEFAULT_WIDTH
    architectures: list[str] = []
    use_bidirectional_attention: bool | str | None = None
    is_causal: bool | None = None
    id2label: dict[str, str] | None = None


def describe(config: WorkerConfig) -> tuple[Geometry, Pattern]:
    """Geometry and token pattern of a mock worker. Raises LoadError if config.json does not decode."""
    path = Path(config.config_path or config.model_path) / "config.json"
    try:
        model = msgspec.convert(decode_object(path.read_bytes()), _ModelConfig) if path.is_file() else _ModelConfig()
    except (OSError, ValueError, msgspec.ValidationError) as e:
        raise LoadError(f"{path}: {e}") from e
    mock = config.mock
    vocab_size = mock.vocab_size or model.vocab_size
    eos = model.eos_token_id
    eos_ids = [] if eos is None else [eos] if isinstance(eos, int) else eos
    num_blocks = config.num_gpu_blocks_override or mock.num_blocks
    length = config.max_model_len or model.max_position_embeddings or mock.max_model_len
    geometry = Geometry(
        num_blocks,
        config.block_size,
        min(length, num_blocks * config.block_size) if config.fit_max_model_len else length,
        vocab_size,
        eos_ids,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        num_host_blocks=mock.num_host_blocks if config.swap_space_gib else 0,
        pooling=_pooling_card(config, model, length),
        num_adapter_places=0 if config.lora is None else config.lora.max_loras,
        num_host_adapters=0 if config.lora is None else config.lora.max_cpu_loras,
        num_prompt_adapters=0 if config.prompts is None else config.prompts.max_adapters,
    )
    if geometry.pooling is not None and not geometry.pooling.has_kv:
        most = max(config.max_num_batched_tokens, length)  # a text is one step's
        geometry = msgspec.structs.replace(geometry, num_blocks=0, num_host_blocks=0, max_num_batched_tokens=most)
    # Tokenizers have special tokens and single bytes at both ends; ids between them are text.
    first_id = mock.first_id or vocab_size // 8
    end_id = mock.end_id or vocab_size - vocab_size // 64
    if not 0 <= first_id < end_id <= vocab_size:
        raise LoadError(f"mock ids {first_id} to {end_id} do not lie in a vocabulary of {vocab_size}")
    return geometry, Pattern(first_id, end_id, mock.eos_every, mock.echo)


def _pooling_card(config: WorkerConfig, model: _ModelConfig, length: int) -> PoolingCard | None:
    """None: the model generates text."""
    if config.task == "generate":
        return None
    task, settings = PoolingTask(config.task), msgspec.structs.asdict(model)
    keeps_kv = not model.architectures or has_kv(settings)
    is_score = task is PoolingTask.SCORE
    width = {PoolingTask.EMBED: model.hidden_size, PoolingTask.CLASSIFY: num_labels(settings)}.get(task, 1)
    labels = [f"LABEL_{i}" for i in range(width)] if task is PoolingTask.CLASSIFY else []
    pooling = "LAST" if keeps_kv else "CLS"
    return PoolingCard(task, width, length, labels, pooling, takes_pairs=is_score, has_kv=keeps_kv)

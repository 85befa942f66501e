"""Makes the card of a pooling model: what it serves and how, for gateways and the scheduler."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockyard.shared.config.pooling.output_kinds import first_kind
from blockyard.shared.config.pooling.pooling_choice import PoolingChoice
from blockyard.shared.config.pooling.sentence_modules import read_modules
from blockyard.shared.config.pooling.sentence_settings import read_settings
from blockyard.shared.messages import NamedPrompt, PoolingCard, PoolingTask


def hidden_size(config: Mapping[str, Any]) -> int:
    """Returns the numbers of a hidden state."""
    return int(config.get("hidden_size") or config.get("n_embd") or config.get("d_model") or 0)


def make_card(
    task: PoolingTask,
    choice: PoolingChoice,
    config: Mapping[str, Any],
    folder: Path,
    max_len: int,
    *,
    has_kv: bool,
    has_pair_template: bool = False,
) -> PoolingCard:
    """Returns the card. config: config.json with --hf-overrides. folder: of the model. Raises ConfigError."""
    modules = read_modules(folder)
    settings = read_settings(folder, modules.transformer_folder if modules is not None else "")
    trained = config.get("matryoshka_dimensions")
    makes_vectors = first_kind(config).makes_vectors
    return PoolingCard(
        task=task,
        width=choice.width,
        max_len=max_len,
        labels=_labels(config, choice.width) if not makes_vectors and task is not PoolingTask.REWARD else [],
        pooling="+".join(mode.name for mode in choice.modes),
        of_tokens=any(mode.is_of_tokens for mode in choice.modes),
        normalizes=choice.normalize,
        is_matryoshka=makes_vectors and bool(config.get("is_matryoshka")),
        dimensions=[one for one in trained if isinstance(one, int)]
        if makes_vectors and isinstance(trained, list)
        else [],
        similarity=settings.similarity.value,
        prompts=[NamedPrompt(name, text) for name, text in settings.prompts.items()],
        default_prompt_name=settings.default_prompt_name,
        include_prompt=choice.include_prompt,
        takes_pairs=task is PoolingTask.SCORE or (task is PoolingTask.CLASSIFY and not has_kv),
        has_pair_template=has_pair_template,
        has_types=not has_kv and int(config.get("type_vocab_size") or 0) > 1,
        has_kv=has_kv,
        is_lower_case=settings.do_lower_case,
        writes_messages=settings.messages.writes_texts,
        joins_dense=modules is not None and modules.joins_dense,
    )


def _labels(config: Mapping[str, Any], count: int) -> list[str]:
    """The names of `id2label`, or those that transformers gives."""
    named = config.get("id2label")
    names = {str(key): str(value) for key, value in named.items()} if isinstance(named, Mapping) else {}
    return [names.get(str(i), f"LABEL_{i}") for i in range(count)]

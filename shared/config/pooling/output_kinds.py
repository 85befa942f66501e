"""What the output layer of an architecture is, by its name in config.json, and the pooling that follows."""

import enum
from collections.abc import Mapping
from typing import Any

from blockyard.shared.config.pooling.modes import PoolingMode


class OutputKind(enum.StrEnum):
    """What a model makes of hidden states."""

    NONE = "none"  # hidden states themselves: `*Model`
    TOKENS = "tokens"  # logits of the vocabulary: `*ForCausalLM`
    CLASSES = "classes"  # logits of labels for a sequence
    TOKEN_CLASSES = "token_classes"
    REWARD = "reward"  # a number for each token
    STEP_REWARD = "step_reward"  # logits of good and bad for each step of a solution

    @property
    def makes_vectors(self) -> bool:
        """Whether hidden states are pooled to vectors. Of others the output layer's numbers are results."""
        return self in (OutputKind.NONE, OutputKind.TOKENS)


_SUFFIXES = {
    "ForSequenceClassification": OutputKind.CLASSES,
    "ForTokenClassification": OutputKind.TOKEN_CLASSES,
    "ForProcessRewardModel": OutputKind.STEP_REWARD,
    "ForRewardModel": OutputKind.REWARD,
    "ForMaskedLM": OutputKind.NONE,  # its head is left out
    "ForCausalLM": OutputKind.TOKENS,
    "ForConditionalGeneration": OutputKind.TOKENS,
    "LMHeadModel": OutputKind.TOKENS,
    "Model": OutputKind.NONE,
}
_POOLING = {
    OutputKind.TOKEN_CLASSES: PoolingMode.ALL,
    OutputKind.REWARD: PoolingMode.ALL,
    OutputKind.STEP_REWARD: PoolingMode.STEP,
}


_STEP_TAGS = {"Qwen2ForProcessRewardModel": 151651}  # <extra_0> of Qwen 2.5


def default_step_tag(config: Mapping[str, Any]) -> int | None:
    """Returns the token that ends a step of a solution, if the model's release has one; None: all tokens count."""
    tag = _STEP_TAGS.get(str(config["architectures"][0]))
    return tag if tag is not None and tag < int(config.get("vocab_size") or 0) else None


def output_kind(architecture: str) -> OutputKind:
    """Returns the kind of an architecture's output layer. Names of no known form mean language models."""
    return next((kind for suffix, kind in _SUFFIXES.items() if architecture.endswith(suffix)), OutputKind.TOKENS)


def first_kind(config: Mapping[str, Any]) -> OutputKind:
    """Returns the kind of the first architecture in config.json."""
    return output_kind(str(config["architectures"][0]))


def sees_both_sides(config: Mapping[str, Any]) -> bool:
    """Whether tokens of a decoder attend to later ones, too: by Gemma's field, which in Gemma 4 may be the word for
    pictures alone, and by the one that transformers reads of all decoders."""
    return config.get("use_bidirectional_attention") is True or config.get("is_causal") is False


def default_pooling(kind: OutputKind, *, has_kv: bool, config: Mapping[str, Any]) -> PoolingMode:
    """Returns the pooling of a model without any in its folder.

    has_kv: tokens attend to earlier ones, so that the last one has seen all. Otherwise the first one stands for all,
    but in decoders that attend to both sides: transformers reads classes from the last token there, too, and vLLM makes
    vectors of all.
    """
    if kind in _POOLING:
        return _POOLING[kind]
    if has_kv:
        return PoolingMode.LAST
    if sees_both_sides(config):
        return PoolingMode.LAST if kind is OutputKind.CLASSES else PoolingMode.MEAN
    if kind is OutputKind.CLASSES and config.get("classifier_pooling") == "mean":
        return PoolingMode.MEAN
    return PoolingMode.CLS

"""Language models that score by the logits of one token or two: config.json as that of a classifier with their rows."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from blockyard.shared.config.pooling.sentence_modules import read_modules
from blockyard.shared.errors import ConfigError

TOKEN_IDS = "classifier_token_ids"  # the key that models read: ids of the false and the true token, or of the latter
_TOKENS = "classifier_from_token"  # the key that users give: their texts, the false one first
_METHOD = "method"  # that vLLM's users give beside it
_METHODS = {1: "no_post_processing", 2: "from_2_way_softmax"}  # by the number of tokens: their logit, or the difference


def settle_classifier(settings: dict[str, Any], folder: Path, tokenizer_folder: Path) -> dict[str, Any]:
    """Returns config.json with the ids of the tokens by which a reranker scores, if it is one.

    By --hf-overrides with `classifier_from_token`, or a LogitScore module in the model's folder. Raises ConfigError.
    """
    tokens, name = settings.get(_TOKENS), str(settings["architectures"][0])
    classifier = name.replace("ForCausalLM", "ForSequenceClassification")
    if tokens is not None:
        if (
            not isinstance(tokens, list)
            or len(tokens) not in _METHODS
            or not all(isinstance(one, str) for one in tokens)
        ):
            raise ConfigError(f"config.json: {_TOKENS} {tokens!r} has to be one or two tokens, the false one first")
        method = _METHODS[len(tokens)]
        if (asked := settings.get(_METHOD, method)) != method:
            raise ConfigError(f"config.json: {_METHOD} {asked!r}: with {_TOKENS} {tokens!r} it is {method}")
        ids = _ids_of(tokens, tokenizer_folder / "tokenizer.json")
        return settings | {"architectures": [classifier], TOKEN_IDS: ids, "num_labels": 1}
    modules = read_modules(folder)
    if modules is None or modules.logit_score is None:
        return settings
    score = modules.logit_score
    ids = [score.true_token_id] if score.false_token_id is None else [score.false_token_id, score.true_token_id]
    return settings | {"architectures": [classifier], TOKEN_IDS: ids, "num_labels": 1}


def _ids_of(tokens: list[str], path: Path) -> list[int]:
    if not path.is_file():
        raise ConfigError(f"config.json: {_TOKENS} needs the ids of its tokens, and there is no {path}")
    tokenizer = Tokenizer.from_file(str(path))
    found = []
    for token in tokens:
        if (one := tokenizer.token_to_id(token)) is None:
            raise ConfigError(f"config.json: {_TOKENS} {token!r} is not a token of {path}")
        found.append(one)
    return found

"""The most characters one token can stand for: a text that must be too long is rejected without encoding it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from tokenizers import Tokenizer, models

COMPOSED = 4  # most characters that Unicode composition turns into one
NUM_BYTES = 256
# Normalizers and pre-tokenizers that never reduce the number of characters.
KEEPING = frozenset(
    {"ByteLevel", "Digits", "FixedLength", "Lowercase", "Metaspace", "NFD", "NFKD", "Prepend", "UnicodeScripts"}
)
# Normalizers and pre-tokenizers that drop only white space.
WHITESPACE_LOSING = frozenset({"BertPreTokenizer", "Strip", "Whitespace", "WhitespaceSplit"})


@dataclass(frozen=True, slots=True)
class TokenChars:
    """One token stands for at most `most` characters, or with `whitespace_lost` for so many besides white space."""

    most: int
    whitespace_lost: bool = False

    def fits(self, text: str, num_tokens: int) -> bool:
        """Returns False only for a text that must have more than `num_tokens` tokens. Fast for texts that fit."""
        limit = self.most * num_tokens
        if len(text) <= limit:
            return True
        return self.whitespace_lost and sum(map(len, text.split())) <= limit

    def fewest_tokens(self, text: str) -> int:
        """Returns a number of tokens that the text has at least."""
        return -(-(sum(map(len, text.split())) if self.whitespace_lost else len(text)) // self.most)


@dataclass(frozen=True, slots=True)
class _Loss:
    """The effect of a tokenizer's stage on the number of characters."""

    factor: int = 1  # most characters that become one
    whitespace: bool = False
    unbounded: bool = False


def max_token_chars(tokenizer: Tokenizer) -> TokenChars | None:
    """Returns None if any number of characters may become one token or none: unknown words, stripped accents."""
    stages = [*_stages(_state(tokenizer.normalizer), "normalizers")]
    stages += _stages(_state(tokenizer.pre_tokenizer), "pretokenizers")
    losses = [_loss(stage) for stage in stages]
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if any(loss.unbounded for loss in losses) or not _covers_all(tokenizer, stages, vocabulary):
        return None
    factor = 1
    for loss in losses:
        factor *= loss.factor
    added = tokenizer.get_added_tokens_decoder().values()
    whitespace = any(loss.whitespace for loss in losses) or any(token.lstrip or token.rstrip for token in added)
    return TokenChars(max(map(len, vocabulary), default=1) * factor, whitespace)


def _state(part: Any) -> dict[str, Any] | None:
    """Returns a part of a tokenizer as in its file."""
    return None if part is None else msgspec.json.decode(part.__getstate__(), type=dict[str, Any])


def _stages(part: dict[str, Any] | None, name: str) -> Iterable[dict[str, Any]]:
    if part is None:
        return
    if part.get("type") == "Sequence":
        for inner in part.get(name, []):
            yield from _stages(inner, name)
    else:
        yield part


def _loss(stage: dict[str, Any]) -> _Loss:
    kind = stage.get("type")
    if kind in KEEPING:
        return _Loss()
    if kind in WHITESPACE_LOSING:
        return _Loss(whitespace=True)
    if kind in ("NFC", "NFKC"):
        return _Loss(factor=COMPOSED)
    pattern = stage.get("pattern")
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    if kind == "Replace" and isinstance(literal, str) and stage.get("content"):
        return _Loss(factor=max(1, -(-len(literal) // len(stage["content"]))))
    if kind in ("Split", "Punctuation"):
        if stage.get("behavior") != "Removed":
            return _Loss()
        if isinstance(literal, str) and literal.isspace() and not stage.get("invert"):
            return _Loss(whitespace=True)
    return _Loss(unbounded=True)


def _covers_all(tokenizer: Tokenizer, stages: list[dict[str, Any]], vocabulary: dict[str, int]) -> bool:
    """True if each character that reaches the model is part of a token with that text, or a token by itself."""
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return False  # unknown words or runs of characters become one token
    if any(stage.get("type") == "ByteLevel" for stage in stages):
        return sum(len(token) == 1 for token in vocabulary) >= NUM_BYTES
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(NUM_BYTES)):
        return True
    return model.unk_token is not None and not model.fuse_unk

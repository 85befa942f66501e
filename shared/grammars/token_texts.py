"""The bytes of each token, for libraries that take a list of them, and the special tokens of a tokenizer."""

from collections.abc import Sequence

import llguidance

from blockyard.shared.grammars.interface import GrammarError, Vocabulary


def load_tokenizer(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """llguidance's view of the tokenizer, for no grammars. It may have more ids than the model. Raises GrammarError."""
    eos = [i for i in vocabulary.eos_token_ids if 0 <= i < vocabulary.vocab_size] or None
    try:
        try:
            return llguidance.LLTokenizer(vocabulary.tokenizer_json, vocabulary.vocab_size, eos, slices=[])
        except ValueError as e:
            if "vocab size too small" not in str(e):
                raise
            return llguidance.LLTokenizer(vocabulary.tokenizer_json, None, eos, slices=[])
    except ValueError as e:
        raise GrammarError(f"structured output does not support the tokenizer of this model: {e}") from e


class TextSpelling:
    """The tokens of a tokenizer, and how it spells text. Where a text names a special token, ordinary tokens write it.

    A tokenizer gives such a text the special token itself, which grammars of text do not allow. llguidance asks for the
    tokens of text that a grammar forces; special tokens that a grammar wants by their id are none of it.
    """

    bos_token_id = None  # this and the other names without an underscore are those that llguidance reads

    def __init__(self, tokenizer: llguidance.LLTokenizer, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, ids = tokenizer, range(tokenizer.vocab_size)
        self.eos_token_id = next((i for i in eos_token_ids if i in ids), None)
        shown = [tokenizer.decode_bytes([i]) for i in ids]
        self.tokens = [b"" if text == b"<[%d]>" % i else text for i, text in zip(ids, shown, strict=True)]  # no token
        self._special = {i for i in ids if self.tokens[i] and (tokenizer.is_special_token(i) or i in eos_token_ids)}
        self.special_token_ids = sorted(self._special)

    def __call__(self, text: str) -> list[int]:
        ids = self._tokenizer.tokenize_str(text)
        if self._special.isdisjoint(ids):
            return ids
        spelled = list[int]()
        for token_id in ids:
            name = self.tokens[token_id].decode("utf-8", "replace") if token_id in self._special else ""
            spelled += self._tokenizer.greedy_tokenize(name) if name else [token_id]
        if self._is(spelled, text):
            return spelled
        spelled = self._tokenizer.greedy_tokenize(text)  # a special token may take in the whitespace beside it
        return spelled if self._is(spelled, text) else []

    def _is(self, ids: list[int], text: str) -> bool:
        return b"".join(self.tokens[i] for i in ids) == text.encode()


def special_token(tokenizer: llguidance.LLTokenizer, text: str) -> int | None:
    """The id of the special token that is this text. None if the text is spelt by other tokens."""
    ids = tokenizer.tokenize_str(text, parse_special=True)
    return ids[0] if len(ids) == 1 and tokenizer.is_special_token(ids[0]) else None


def token_texts(vocabulary: Vocabulary) -> list[bytes]:
    """The bytes of each id of the model; b"" for special tokens, end-of-sequence ids and ids without a token."""
    tokenizer = load_tokenizer(vocabulary)
    none = set(vocabulary.eos_token_ids)
    size = min(vocabulary.vocab_size, tokenizer.vocab_size)
    return [b"" if i in none or tokenizer.is_special_token(i) else tokenizer.decode_bytes([i]) for i in range(size)] + [
        b""
    ] * (vocabulary.vocab_size - size)

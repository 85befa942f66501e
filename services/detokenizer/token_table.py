"""The text of each token id, looked up once: bytes of byte-level tokens, text of other tokens.

Three kinds of decoders cover all tokenizers. Byte-level BPE and sentencepiece give every token its own text, so a
stream joins table entries and keeps only the bytes of an incomplete character. In others (WordPiece, for example) a
token's text depends on its neighbours, and the tokenizer decodes a window of ids.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import msgspec
from tokenizers import AddedToken as AddedTokenText
from tokenizers import Tokenizer

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import AddedToken, StreamOpen

MAX_SHOWN_SETS = 64  # gateways ask for few
MOST_TABLES = 64  # of adapters: each has the texts of the tokens that its streams had
_encode = msgspec.msgpack.Encoder().encode


class UnknownToken(RequestError):
    """A token id outside the model's vocabulary."""


class TokenKind(Enum):
    BYTES = auto()  # ByteLevel
    PIECES = auto()  # sentencepiece: replacements, `<0xNN>` byte tokens, a stripped start
    WINDOW = auto()  # anything else


@dataclass(frozen=True, slots=True)
class Decoding:
    """How the tokenizer's decoder joins tokens."""

    kind: TokenKind
    replaces: tuple[tuple[str, str], ...] = ()  # within each token, in order
    byte_fallback: bool = False
    strip: str = ""  # this character is cut from the start of the text ...
    strip_count: int = 0  # ... at most this many times
    drop_in_first: str = ""  # Metaspace: in the first token this character is dropped instead of becoming a space


class _Step(msgspec.Struct):
    """One decoder of a tokenizer.json, any type."""

    type: str
    decoders: list[Any] = []
    pattern: dict[str, str] = {}
    content: str = ""
    start: int = 0
    stop: int = 0
    replacement: str = ""
    prepend_scheme: str = "always"


def decoding_of(tokenizer: Tokenizer) -> Decoding:
    """Reads the decoder's own description."""
    if tokenizer.decoder is None:
        return Decoding(TokenKind.WINDOW)
    step = msgspec.json.decode(tokenizer.decoder.__getstate__(), type=_Step)
    steps = [msgspec.convert(s, _Step) for s in step.decoders] if step.type == "Sequence" else [step]
    kinds = [s.type for s in steps]
    if kinds == ["ByteLevel"]:
        return Decoding(TokenKind.BYTES)
    if kinds == ["Metaspace"]:
        mark = steps[0].replacement
        first = "" if steps[0].prepend_scheme == "never" else mark
        return Decoding(TokenKind.PIECES, ((mark, " "),), drop_in_first=first)
    return _pieces(steps) or Decoding(TokenKind.WINDOW)


def _pieces(steps: list[_Step]) -> Decoding | None:
    """Reads Replace*, ByteFallback?, Fuse, Strip(left)?: the steps of converted sentencepiece models."""
    replaces: list[tuple[str, str]] = []
    byte_fallback = False
    rest = list(steps)
    while rest and rest[0].type == "Replace" and "String" in rest[0].pattern:
        replaces.append((rest[0].pattern["String"], rest.pop(0).content))
    if rest and rest[0].type == "ByteFallback":
        byte_fallback = True
        rest.pop(0)
    if not rest or rest.pop(0).type != "Fuse":
        return None
    if not rest:
        return Decoding(TokenKind.PIECES, tuple(replaces), byte_fallback)
    if len(rest) == 1 and rest[0].type == "Strip" and rest[0].stop == 0:
        return Decoding(TokenKind.PIECES, tuple(replaces), byte_fallback, rest[0].content, rest[0].start)
    return None


def _byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's alphabet: printable Latin-1 characters stand for themselves, other bytes from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


BYTE_OF = _byte_alphabet()


class TokenTable:
    """One tokenizer's tokens. Ids that the model has beyond the tokenizer's have no text."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = self.model_vocab_size = vocab_size
        self.decoding = decoding_of(tokenizer)
        self._added = tokenizer.get_added_tokens_decoder()
        self.pieces = Pieces(self, skip_special=False)
        self.pieces_without_special = Pieces(self, skip_special=True)
        self._pieces_showing: dict[frozenset[str], Pieces] = {}
        self._raw: dict[int, bytes] = {}

    def with_added(self, tokens: Sequence[AddedToken], vocab_size: int) -> "TokenTable":
        """The table of an adapter's requests: these tokens are not in the model's tokenizer.

        vocab_size: with the ids that the adapter adds.
        """
        own = [AddedTokenText(one.text, special=one.is_special, normalized=False) for one in tokens]
        tokenizer = self.tokenizer
        if own and self.decoding.kind is TokenKind.WINDOW:  # its decoder needs them
            tokenizer = Tokenizer.from_str(tokenizer.to_str())
            tokenizer.add_tokens(own)
        table = TokenTable(tokenizer, vocab_size)
        table._added |= dict(zip((one.token_id for one in tokens), own, strict=True))
        return table

    def raise_vocab_size(self, model_vocab_size: int) -> None:
        """The model may have more ids than the tokenizer: padding of its embedding, without text."""
        self.model_vocab_size = model_vocab_size
        self.vocab_size = max(self.vocab_size, model_vocab_size)

    def is_added(self, token_id: int) -> bool:
        return token_id in self._added

    def is_special(self, token_id: int) -> bool:
        return token_id in self._added and self._added[token_id].special

    def token(self, token_id: int) -> str | None:
        """Returns the token in the vocabulary's spelling; None for a padding id of the model. Raises UnknownToken."""
        if not 0 <= token_id < self.vocab_size:
            raise UnknownToken(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        if token_id in self._added:
            return str(self._added[token_id].content)
        text: str | None = self.tokenizer.id_to_token(token_id)
        return text

    def raw(self, token_id: int) -> bytes:
        """Returns the token's own bytes for log-probabilities, also of special tokens. Raises UnknownToken."""
        data = self._raw.get(token_id)
        if data is None:
            data = self._raw[token_id] = self._bytes_of(token_id)
        return data

    def _bytes_of(self, token_id: int) -> bytes:
        token = self.token(token_id)
        if token is None:
            return b""
        if self.decoding.kind is TokenKind.WINDOW:
            return self.tokenizer.decode([token_id], skip_special_tokens=False).encode()
        if self.decoding.kind is TokenKind.BYTES:
            try:
                return bytes([BYTE_OF[c] for c in token])
            except KeyError:  # an added token with characters outside the alphabet
                return token.encode()
        for pattern, content in self.decoding.replaces:
            token = token.replace(pattern, content)
        byte = _fallback_byte(token) if self.decoding.byte_fallback else None
        return token.encode() if byte is None else byte

    def is_hidden(self, token_id: int, shown: Collection[str]) -> bool:
        """True for special tokens that are not among `shown`."""
        return self.is_special(token_id) and self._added[token_id].content not in shown

    def pieces_showing(self, shown: Collection[str]) -> "Pieces":
        """Pieces without special tokens, but for those in `shown`: the markers of the formats of a deployment."""
        if not shown:
            return self.pieces_without_special
        key = frozenset(shown)
        pieces = self._pieces_showing.get(key)
        if pieces is None:
            if len(self._pieces_showing) == MAX_SHOWN_SETS:
                self._pieces_showing.clear()
            pieces = self._pieces_showing[key] = Pieces(self, skip_special=True, shown=key)
        return pieces

    def piece(self, token_id: int, skip_special: bool, shown: Collection[str] = ()) -> str | bytes:
        """Returns complete text, or bytes that may be part of a character; b"" adds nothing."""
        data = self.raw(token_id)
        if skip_special and self.is_hidden(token_id, shown):
            return b""
        try:
            return data.decode() or b""
        except UnicodeDecodeError:
            return data


def _fallback_byte(token: str) -> bytes | None:
    """Returns the byte of `<0xNN>`, sentencepiece's spelling of byte tokens."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            return None
    return None


class Pieces(dict[int, str | bytes]):
    """Cache of `TokenTable.piece` by id."""

    def __init__(self, table: TokenTable, skip_special: bool, shown: Collection[str] = ()) -> None:
        super().__init__()
        self._table, self._skip_special, self._shown = table, skip_special, shown

    def __missing__(self, token_id: int) -> str | bytes:
        piece = self[token_id] = self._table.piece(token_id, self._skip_special, self._shown)
        return piece


class AdapterTables:
    """Finds the table of a stream, by what its adapter adds."""

    def __init__(self, base: TokenTable) -> None:
        self._base = base
        self._tables: dict[bytes, TokenTable] = {}  # the one last used at the end

    def of(self, opened: StreamOpen) -> TokenTable:
        if not opened.num_added_tokens and not opened.added_tokens:
            return self._base
        vocab_size = self._base.model_vocab_size + opened.num_added_tokens
        key = _encode((vocab_size, opened.added_tokens))
        table = self._tables.pop(key, None) or self._base.with_added(opened.added_tokens, vocab_size)
        self._tables[key] = table
        if len(self._tables) > MOST_TABLES:
            del self._tables[next(iter(self._tables))]
        return table

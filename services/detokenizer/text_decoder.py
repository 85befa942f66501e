"""Incremental decoding of token ids. An incomplete character is held back."""

import codecs
from collections.abc import Collection
from typing import Protocol

from tokenizers import Tokenizer

from blockyard.services.detokenizer.token_table import TokenKind, TokenTable


class TextDecoder(Protocol):
    def push(self, token_id: int) -> str:
        """Returns text that this token completes. Raises UnknownToken without a change of state."""
        ...

    def flush(self) -> str:
        """Returns held-back bytes as replacement characters, at the end of the stream."""
        ...


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Writes one replacement character for each byte of a broken character, as sentencepiece does."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("blockyard.replace_each_byte", _replace_each_byte)


class PieceDecoder:
    """Joins table entries. Equal to the tokenizer's own decode of all ids.

    One difference: a broken byte token does not affect whole characters before it. `tokenizers` turns the whole run of
    byte tokens into replacement characters, which is impossible for text that was sent already.
    """

    __slots__ = ("_drop_in_first", "_errors", "_pending", "_pieces", "_strip", "_strip_left", "_table")

    def __init__(self, table: TokenTable, skip_special: bool, shown_special: Collection[str] = ()) -> None:
        decoding = table.decoding
        self._table = table
        self._pieces = table.pieces_showing(shown_special) if skip_special else table.pieces
        self._pending = b""
        self._errors = "replace" if decoding.kind is TokenKind.BYTES else "blockyard.replace_each_byte"
        self._strip = decoding.strip
        self._strip_left = decoding.strip_count if decoding.strip else 0
        self._drop_in_first = decoding.drop_in_first

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if self._strip_left or self._drop_in_first:
            return self._start(token_id, piece)
        if piece.__class__ is str and not self._pending:
            return piece
        return self._join(piece)

    def flush(self) -> str:
        text, _ = codecs.utf_8_decode(self._pending, self._errors, True)
        self._pending = b""
        return self._cut_start(text) if self._strip_left else text

    def _join(self, piece: str | bytes) -> str:
        if isinstance(piece, str):  # begins a character: the pending bytes stay incomplete
            text, _ = codecs.utf_8_decode(self._pending, self._errors, True)
            self._pending = b""
            return text + piece
        data = self._pending + piece
        text, used = codecs.utf_8_decode(data, self._errors, False)
        self._pending = data[used:]
        return text

    def _start(self, token_id: int, piece: str | bytes) -> str:
        """Decodes the beginning of the text, without sentencepiece's leading space."""
        if piece == b"":
            return ""
        if self._drop_in_first:
            piece = (self._table.token(token_id) or "").replace(self._drop_in_first, "")
            self._drop_in_first = ""
        text = self._join(piece)
        return self._cut_start(text) if self._strip_left else text

    def _cut_start(self, text: str) -> str:
        if not text:
            return text
        cut = 0
        while cut < min(self._strip_left, len(text)) and text[cut] == self._strip:
            cut += 1
        self._strip_left = self._strip_left - cut if cut == len(text) else 0
        return text[cut:]


class WindowDecoder:
    """For tokenizers where neighbours change a token's text: decodes each token with the ids of the text before it."""

    def __init__(
        self,
        table: TokenTable,
        skip_special: bool,
        spaces_between_special: bool,
        shown_special: Collection[str] = (),
    ) -> None:
        self._table = table
        self._shown_special = shown_special if skip_special else ()
        self._tokenizer: Tokenizer = table.tokenizer
        self._skip_special = skip_special
        self._spaces = skip_special or spaces_between_special
        self._last_added = False
        self._ids: list[int] = []
        self._start = 0  # ids before it are context: their text was returned by an earlier push
        self._shown = ""  # text of `_ids` that was returned

    def push(self, token_id: int) -> str:
        token = self._table.token(token_id)
        self._ids.append(token_id)
        text = self._decode(self._ids)
        new = text[len(self._shown) :]
        if not new or new.endswith("\ufffd"):
            return ""
        self._advance()
        added, self._last_added = self._last_added, self._table.is_added(token_id)
        if added and self._last_added and not self._spaces:
            return token or ""
        return new

    def flush(self) -> str:
        new = self._decode(self._ids)[len(self._shown) :]
        self._advance()
        return new

    def _advance(self) -> None:
        self._ids = self._ids[self._start :]
        self._start = len(self._ids)
        self._shown = self._decode(self._ids)

    def _decode(self, ids: list[int]) -> str:
        if self._shown_special:
            ids = [i for i in ids if not self._table.is_hidden(i, self._shown_special)]
            return str(self._tokenizer.decode(ids, skip_special_tokens=False))
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip_special))


def new_decoder(
    table: TokenTable, skip_special: bool, spaces_between_special: bool, shown_special: Collection[str] = ()
) -> TextDecoder:
    """`spaces_between_special` matters only for tokenizers that put spaces between tokens.

    Special tokens in `shown_special` are not skipped.
    """
    if table.decoding.kind is TokenKind.WINDOW:
        return WindowDecoder(table, skip_special, spaces_between_special, shown_special)
    return PieceDecoder(table, skip_special, shown_special)

"""Where each token of an answer begins in its text: the `text_offset` of log-probabilities.

The tokens of an answer and its text do not match everywhere: special tokens are left out of the text, a character may
consist of several tokens, a tokenizer may have dropped a leading space or normalised the prompt, and text may arrive
behind its tokens. Therefore each token is looked for in the text instead of adding up lengths.
"""

SLACK_BYTES = 8  # how much longer than its tokens normalised text may be
REPLACEMENT = "\ufffd".encode()  # stands for bytes that are no UTF-8


class TextOffsets:
    """The offsets of one choice, with tokens and text in pieces. Offsets count characters.

    A token that begins within a character has the offset of this character; one that is not in the text has the
    offset of the text behind it.
    """

    __slots__ = ("_ahead", "_at", "_num_chars", "_partial", "_text", "_tokens_as_ids", "_unmatched")

    def __init__(self, tokens_as_ids: bool = False) -> None:
        """`tokens_as_ids`: tokens are shown as `token_id:N`, and offsets add up these names, as in vLLM."""
        self._tokens_as_ids = tokens_as_ids
        self._text, self._at = b"", 0  # the last piece in UTF-8, and how much of it is matched with tokens
        self._num_chars = 0  # of the matched text
        self._partial = b""  # the start of a character at the end of the matched text
        self._ahead = b""  # bytes of tokens before their text has arrived
        self._unmatched = 0  # bytes of tokens that were not found since the last one that was

    def take(self, tokens: list[bytes], text: str) -> list[int]:
        """Returns the offset of each of the next tokens, which came with the next piece of text."""
        if self._tokens_as_ids:
            text = b"".join(tokens).decode()
        self._text, self._at = text.encode("utf-8", "replace"), 0
        self._match_ahead()
        offsets = [self._next(token) for token in tokens]
        self._advance(len(self._text) - self._at)  # text never comes before its tokens
        self._unmatched = 0
        return offsets

    def _match_ahead(self) -> None:
        common = min(len(self._ahead), len(self._text))
        if self._ahead[:common] == self._text[:common]:
            self._advance(common)
            self._ahead = self._ahead[common:]
        else:  # these tokens were special, or their bytes are no UTF-8
            self._ahead = b""
            self._skip_replacements()

    def _next(self, token: bytes) -> int:
        left = len(self._text) - self._at
        if not left:  # as in a streamed answer that holds text back
            offset = self._num_chars + _num_chars(self._partial + self._ahead)
            self._ahead += token
            return offset
        for spelling in (token, token.removeprefix(b" ")):
            if spelling and self._text.startswith(spelling[:left], self._at):
                self._ahead = spelling[left:]
                return self._found(self._at, len(spelling) - len(self._ahead))
        if self._unmatched and token:
            place = self._text.find(token, self._at, self._at + self._unmatched + len(token) + SLACK_BYTES)
            if place >= 0:
                return self._found(place, len(token))
        offset = self._num_chars
        if not self._skip_replacements():
            self._unmatched += len(token)
        return offset

    def _found(self, place: int, size: int) -> int:
        self._advance(place - self._at)
        offset = self._num_chars
        self._advance(size)
        self._unmatched = 0
        return offset

    def _skip_replacements(self) -> bool:
        """Skips the characters that stand for bytes that are no UTF-8."""
        began = self._at
        while self._text.startswith(REPLACEMENT, self._at):
            self._advance(len(REPLACEMENT))
        return self._at > began

    def _advance(self, num_bytes: int) -> None:
        matched = self._partial + self._text[self._at : self._at + num_bytes]
        self._at += num_bytes
        whole = matched.decode("utf-8", "ignore")  # only the last character may be incomplete
        self._num_chars += len(whole)
        self._partial = matched[len(whole.encode()) :]


def _num_chars(data: bytes) -> int:
    return len(data.decode("utf-8", "ignore"))

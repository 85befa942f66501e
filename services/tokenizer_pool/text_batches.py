"""Turns many texts, or pairs of texts, into ids at once. No sockets."""

from array import array
from collections.abc import Callable, Sequence

from tokenizers import Encoding, Tokenizer

from blockyard.services.tokenizer_pool.chats.pair_template import PairTemplate
from blockyard.services.tokenizer_pool.chats.text_template import TextTemplate
from blockyard.services.tokenizer_pool.token_chars import TokenChars
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import TextError, TextsTokenized, TokenizeTexts

TOO_LONG = "context_length_exceeded"


class TextBatches:
    """One tokenizer. Its truncation is off between two calls."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        token_chars: TokenChars | None,
        pair_template: PairTemplate | None = None,
        text_template: TextTemplate | None = None,
    ) -> None:
        """token_chars: as in `TextCodec`. pair_template: None for pairs that the tokenizer joins. text_template: None
        for texts that are tokenized as they are."""
        self._tokenizer, self._token_chars = tokenizer, token_chars
        self._pair_template, self._text_template = pair_template, text_template
        self._special_ids = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)

    def encode(self, request: TokenizeTexts, vocab_size: int) -> TextsTokenized:
        """Returns the ids of all texts; one that has none is in `errors`."""
        errors = self._refused(request)
        wanted = [i for i in range(len(request.texts)) if i not in errors]
        encodings = dict(zip(wanted, self._encodings(request, wanted), strict=True))
        ids, lengths, seconds = array("I"), array("I"), array("I")
        for i in range(len(request.texts)):
            found = encodings[i].ids if i in encodings else []
            if found and (error := _problem(i, found, request, vocab_size)) is not None:
                errors[i], found = error, []
            ids.extend(found)
            lengths.append(len(found))
            if request.seconds:
                seconds.append(_second_start(encodings[i]) if found else 0)
        listed = [errors[i] for i in sorted(errors)]
        counts = request.prompt and request.counts_prompt and self._text_template is None
        skip = self._prompt_length(request) if counts else 0
        return TextsTokenized(request.request_id, ids.tobytes(), lengths.tobytes(), seconds.tobytes(), skip, listed)

    def _refused(self, request: TokenizeTexts) -> dict[int, TextError]:
        """The texts that are not encoded: not valid Unicode, or so long that they cannot fit."""
        found: dict[int, TextError] = {}
        for texts, is_second in ((request.texts, False), (request.seconds, True)):
            for i, text in enumerate(texts):
                if i in found:
                    continue
                if not _is_unicode(text):
                    found[i] = TextError(i, "the text has half a surrogate pair in it", is_second)
                elif self._cannot_fit(text, request):
                    assert self._token_chars is not None
                    fewest = self._token_chars.fewest_tokens(text)
                    found[i] = _too_long(i, f"at least {fewest}", fewest, request.max_tokens, is_second)
        return found

    def _cannot_fit(self, text: str, request: TokenizeTexts) -> bool:
        if request.truncate or not request.max_tokens or self._token_chars is None:
            return False
        is_cut = request.max_first_tokens or request.max_second_tokens
        return not is_cut and not self._token_chars.fits(text, request.max_tokens)

    def _encodings(self, request: TokenizeTexts, wanted: Sequence[int]) -> list[Encoding]:
        """Encodes the texts at these places by one call; sides of pairs with limits of their own by one call each."""
        if request.seconds and self._pair_template is not None:
            return self._rendered(self._pair_template, request, wanted)
        if not request.seconds and self._text_template is not None:
            return self._written(self._text_template, request, wanted)
        if request.instruction is not None:
            raise RequestError("this model has no template of pairs that shows an instruction", "instruction")
        texts = [request.texts[i] for i in wanted]
        seconds = [request.seconds[i] for i in wanted] if request.seconds else []
        special, left, most_first = request.add_special_tokens, request.truncates_left, request.max_first_tokens
        if request.prompt and (most_first or (request.truncate and left)):
            texts, most_first = self._cut_texts(texts, left, most_first), 0  # the prompt is no part of what is cut
            if request.truncate and left:
                return self._cut_behind_prompt(
                    request, texts, self._cut_texts(seconds, left, request.max_second_tokens)
                )
        texts = [request.prompt + text for text in texts]
        try:
            if not most_first and not request.max_second_tokens:
                self._truncate(request.max_tokens if request.truncate else 0, request.truncates_left)
                inputs = list(zip(texts, seconds, strict=True)) if seconds else texts
                return list(self._tokenizer.encode_batch_fast(inputs, add_special_tokens=special))
            sides = [
                self._cut(side, most, left)
                for side, most in ((texts, most_first), (seconds, request.max_second_tokens))
            ]
            self._truncate(request.max_tokens if request.truncate else 0, request.truncates_left)
            others: list[Encoding | None] = [*sides[1]] if seconds else [None] * len(texts)
            return [
                self._tokenizer.post_process(one, other, special) for one, other in zip(sides[0], others, strict=True)
            ]
        finally:
            self._tokenizer.no_truncation()

    def _cut_behind_prompt(
        self, request: TokenizeTexts, texts: Sequence[str], seconds: Sequence[str]
    ) -> list[Encoding]:
        """Encodes the prompt with each text or pair. If that is too long, beginnings of the texts are cut."""
        special, tokenizer = request.add_special_tokens, self._tokenizer
        (prompt,) = tokenizer.encode_batch_fast([request.prompt], add_special_tokens=False)
        firsts = [request.prompt + text for text in texts]
        whole = list(zip(firsts, seconds, strict=True)) if seconds else firsts
        found = list(tokenizer.encode_batch_fast(whole, add_special_tokens=special))
        for place, text in enumerate(texts):
            second = seconds[place] if seconds else None
            room = request.max_tokens - len(prompt.ids)
            while len(found[place].ids) > request.max_tokens and room > 0:
                self._truncate(room, left=True)
                kept = tokenizer.encode(text, second, add_special_tokens=special)
                tokenizer.no_truncation()
                first = request.prompt + _kept_end(kept, 0, text)
                other = None if second is None else _kept_end(kept, 1, second)
                found[place] = tokenizer.encode(first, other, add_special_tokens=special)
                # once more where what is left takes more tokens than within the text
                room -= max(1, len(found[place].ids) - request.max_tokens)
        return found

    def _rendered(self, template: PairTemplate, request: TokenizeTexts, wanted: Sequence[int]) -> list[Encoding]:
        """Encodes rendered pairs. Templates have special tokens. If a pair is too long, the document is cut.

        The model's prompt is the instruction of a request without one, as in sentence-transformers.
        """
        instruction = request.prompt or None if request.instruction is None else request.instruction
        left = request.truncates_left
        queries = self._cut_texts([request.texts[i] for i in wanted], left, request.max_first_tokens)
        documents = self._cut_texts([request.seconds[i] for i in wanted], left, request.max_second_tokens)
        return self._fitted(request, documents, lambda i, document: template.render(queries[i], document, instruction))

    def _written(self, template: TextTemplate, request: TokenizeTexts, wanted: Sequence[int]) -> list[Encoding]:
        """Encodes texts that the chat template writes. If one is too long, it is cut, and not what is around it."""
        texts = [request.texts[i] for i in wanted]
        texts = self._cut_texts(texts, request.truncates_left, request.max_first_tokens)
        return self._fitted(request, texts, lambda _, text: template.render(text, request.prompt))

    def _fitted(self, request: TokenizeTexts, texts: list[str], render: Callable[[int, str], str]) -> list[Encoding]:
        """Encodes what `render` makes of each place and text. If it has to be cut to fit, the text is."""
        self._tokenizer.no_truncation()
        written = [render(place, text) for place, text in enumerate(texts)]
        found = list(self._tokenizer.encode_batch_fast(written, add_special_tokens=False))
        most = request.max_tokens if request.truncate else 0
        for place, text in enumerate(texts):
            kept, before = text, ""
            # once more where a part of a word that is left takes more tokens than within the text
            while most and kept != before and (excess := len(found[place].ids) - most) > 0:
                before = kept
                (kept,) = self._cut_texts([before], request.truncates_left, 0, excess)
                (found[place],) = self._tokenizer.encode_batch_fast([render(place, kept)], add_special_tokens=False)
        return found

    def _cut_texts(self, texts: list[str], left: bool, most: int, excess: int = 0) -> list[str]:
        """Returns the beginnings of texts, or with `left` their ends: `most` tokens (0: all) without `excess` ones."""
        if not most and not excess:
            return texts
        self._tokenizer.no_truncation()
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [
            _cut_text(text, encoding.offsets, max(0, (most or len(encoding.ids)) - excess), left)
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def _cut(self, texts: list[str], most: int, left: bool) -> list[Encoding]:
        """Encodes texts without special tokens, up to `most` tokens (0: no limit)."""
        self._truncate(most, left)
        return list(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))

    def _truncate(self, most: int, left: bool) -> None:
        if most:
            self._tokenizer.enable_truncation(most, direction="left" if left else "right")
        else:
            self._tokenizer.no_truncation()

    def _prompt_length(self, request: TokenizeTexts) -> int:
        """Leading tokens of each text that are the prompt's, counted as sentence-transformers does."""
        (encoding,) = self._tokenizer.encode_batch_fast([request.prompt], add_special_tokens=request.add_special_tokens)
        ids = encoding.ids
        return len(ids) - 1 if ids and ids[-1] in self._special_ids else len(ids)


def _cut_text(text: str, offsets: Sequence[tuple[int, int]], count: int, left: bool) -> str:
    """The characters of the first `count` tokens, or with `left` of the last ones. offsets: of all tokens.

    Several tokens may be bytes of one character, which is cut then.
    """
    if count >= len(offsets):
        return text
    if not count:
        return ""
    if left:
        return text[max(offsets[-count][0], offsets[-count - 1][1]) :]
    return text[: min(offsets[count - 1][1], offsets[count][0])]


def _kept_end(encoding: Encoding, which: int, text: str) -> str:
    """The end of a text whose last tokens are in the encoding. which: 1 for the second text of a pair."""
    starts = [o[0] for one, o in zip(encoding.sequence_ids, encoding.offsets, strict=True) if one == which]
    return text[min(starts) :] if starts else ""


def _problem(index: int, ids: list[int], request: TokenizeTexts, vocab_size: int) -> TextError | None:
    """Why a text cannot be computed. If a pair is too long, the longer text of it is named."""
    if request.max_tokens and len(ids) > request.max_tokens:
        if request.truncate:
            message = (
                f"The text cannot be cut to {request.max_tokens} tokens: the special tokens around it, or the template "
                "with the other text, take more."
            )
            return TextError(index, message, False, TOO_LONG, len(ids), request.max_tokens)
        is_second = bool(request.seconds) and len(request.seconds[index]) >= len(request.texts[index])
        return _too_long(index, str(len(ids)), len(ids), request.max_tokens, is_second)
    if max(ids) >= vocab_size:
        return TextError(index, f"token id {max(ids)} is outside the vocabulary of {vocab_size}")
    return None


def _too_long(index: int, how_many: str, num_tokens: int, most: int, is_second: bool = False) -> TextError:
    message = (
        f"This model's maximum context length is {most} tokens. However, the text has {how_many}. "
        "`truncate_prompt_tokens`, for /v2/embed `truncate`, cuts it."
    )
    return TextError(index, message, is_second, TOO_LONG, num_tokens, most)


def _second_start(encoding: Encoding) -> int:
    """Where the tokens of type 1 begin."""
    types = encoding.type_ids
    return types.index(1) if 1 in types else len(types)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

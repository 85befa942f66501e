"""Turns text, chats and ids into token ids with block hashes, and ids into text. No sockets."""

from typing import TypeVar

import msgspec
from tokenizers import Tokenizer

from blockyard.services.tokenizer_pool.chats.chat_template import Chat, ChatTemplates
from blockyard.services.tokenizer_pool.chats.pair_template import PairTemplate
from blockyard.services.tokenizer_pool.chats.text_template import TextTemplate
from blockyard.services.tokenizer_pool.fill_in_middle import FillInMiddle
from blockyard.services.tokenizer_pool.text_batches import TextBatches
from blockyard.services.tokenizer_pool.token_chars import TokenChars
from blockyard.services.tokenizer_pool.token_spans import (
    NO_MARKS,
    Marks,
    assistant_mask,
    packed_offsets,
    without_marks,
)
from blockyard.services.tokenizer_pool.workers.job_limits import Phases, Unlimited
from blockyard.shared.block_hashes import block_hashes, root_hash
from blockyard.shared.config.services.tokenizer import TokenizerConfig
from blockyard.shared.errors import RequestError, TooLong
from blockyard.shared.messages import (
    DescribeTokenizer,
    Detokenize,
    Detokenized,
    TextRejected,
    TextsTokenized,
    Tokenize,
    Tokenized,
    TokenizerDescription,
    TokenizeTexts,
)
from blockyard.shared.token_ids import first_outside, num_ids, pack, unpack, virtual_ids

T = TypeVar("T")

PROMPT_END_TOKENS = 16  # where the marker that ends reasoning is looked for: whitespace may follow it


class TextCodec:
    """One tokenizer with its chat templates.

    `token_chars` bounds the characters a token may have; None: every text is encoded to count its tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        templates: ChatTemplates,
        config: TokenizerConfig,
        token_chars: TokenChars | None = None,
        settings: bytes = b"{}",
        eos_token: str = "",
    ) -> None:
        """`settings`: of the tokenizer, for a `TokenizerDescription`. `eos_token`: ends answers of an adapter."""
        self._eos_token_id = tokenizer.token_to_id(eos_token) if eos_token else None
        self._tokenizer = tokenizer
        self._own_vocab_size = self.vocab_size = vocab_size
        self._templates = templates
        self._config = config
        self._token_chars = token_chars
        self._settings = settings
        self._fill_in_middle = FillInMiddle(tokenizer, config.fim_template)
        source, messages = config.pair_template, config.messages
        pairs = None if source is None else PairTemplate(source, templates.special_tokens, messages)
        written = TextTemplate(templates, messages) if messages.writes_texts else None
        self._batches = TextBatches(tokenizer, token_chars, pairs, written)
        self._phases: Phases = Unlimited()

    def set_phases(self, phases: Phases) -> None:
        """Sets the limits of both parts of every later job."""
        self._phases = phases

    def set_model_vocab_size(self, model_vocab_size: int) -> None:
        """Sets which token ids are valid; 0: the model's size is not known, the tokenizer's own counts."""
        self.vocab_size = model_vocab_size or self._own_vocab_size

    def answer(
        self, work: Tokenize | TokenizeTexts | Detokenize | DescribeTokenizer
    ) -> Tokenized | TextsTokenized | Detokenized | TokenizerDescription | TextRejected:
        match work:
            case Tokenize():
                return self.tokenize(work)
            case TokenizeTexts():
                return self.tokenize_texts(work)
            case DescribeTokenizer():
                return TokenizerDescription(work.request_id, self._settings)
        return self.detokenize(work)

    def tokenize_texts(self, request: TokenizeTexts) -> TextsTokenized | TextRejected:
        try:
            with self._phases.encoding("input"):
                return self._batches.encode(request, self.vocab_size)
        except RequestError as e:
            return TextRejected(request.request_id, e.field, str(e))

    def tokenize(self, request: Tokenize) -> Tokenized | TextRejected:
        try:
            return self._tokenize(request)
        except RequestError as e:
            num_tokens, max_tokens = e.too_long or (0, 0)
            return TextRejected(request.request_id, e.field, str(e), e.code or "", num_tokens, max_tokens)

    def detokenize(self, request: Detokenize) -> Detokenized | TextRejected:
        try:
            with self._phases.encoding("tokens"):
                self._check(request.token_ids, "tokens")
                return Detokenized(request.request_id, self._text_of(request.token_ids))
        except RequestError as e:
            return TextRejected(request.request_id, e.field, str(e))

    def _tokenize(self, request: Tokenize) -> Tokenized:
        if sum(given is not None for given in (request.text, request.messages, request.token_ids)) != 1:
            raise RequestError("one of text, messages and token ids is needed", "prompt")
        text, field = request.text, "prompt"
        spans: list[tuple[int, int]] = []
        if request.messages is not None:
            field = "messages"
            marks = Marks.new() if request.want_assistant_mask else NO_MARKS
            with self._phases.rendering(field):
                text = self._rendered(request, request.messages, marks)
            if request.want_assistant_mask:
                text, spans = without_marks(text, marks)
        with self._phases.encoding(field):
            done = self._encoded(request, text, field)
            if text is not None and request.suffix is None and (request.want_offsets or spans):
                return self._with_spans(done, request, text, spans)
            return done

    def _with_spans(self, done: Tokenized, request: Tokenize, text: str, spans: list[tuple[int, int]]) -> Tokenized:
        """Encodes a second time: only requests that are rendered ask for it."""
        offsets = self._tokenizer.encode(text, add_special_tokens=_adds_special(request)).offsets
        return msgspec.structs.replace(
            done,
            offsets=packed_offsets(offsets) if request.want_offsets else b"",
            assistant_mask=assistant_mask(offsets, spans) if spans else b"",
        )

    def _rendered(self, request: Tokenize, messages: bytes, marks: Marks) -> str:
        try:
            # marks are no part of the prompt: with them its length is checked when they are out
            most = None if marks.begin else self._most_chars(request)
            return self._templates.render(self._chat(request, messages, marks), most)
        except RequestError as e:
            if e.code == "context_length_exceeded":
                e.too_long = TooLong(request.max_tokens + 1, request.max_tokens)
            raise

    def _encoded(self, request: Tokenize, text: str | None, field: str) -> Tokenized:
        special = _adds_special(request)
        if text is not None and request.suffix is not None:
            data = pack(self._around_hole(text, request.suffix, request.max_tokens, special))
        elif text is not None:
            self._check_chars(text, request.max_tokens, field)
            data = pack(self._encode(text, special, field))
        else:
            data = request.token_ids or b""
        self._check(data, field)
        if 0 < request.max_tokens < num_ids(data):
            raise _too_long(num_ids(data), f"{num_ids(data)} tokens in the {field}", request.max_tokens, field)
        opened = self._reasoning_opened(request, text, data)
        begin_after = [] if opened is False else self._open_reasoning(request.reasoning_end, data)
        salt, adapter = request.cache_salt, request.adapter_digest
        root = root_hash(self._config.block_scope, cache_salt=salt, adapter=adapter)
        if not request.want_text:
            text = ""
        elif text is None or request.suffix is not None:
            text = self._text_of(data)
        return Tokenized(
            request.request_id,
            data,
            block_hashes(root, virtual_ids(request.num_virtual_tokens) + data, self._config.block_size),
            self._bad_words(request.bad_words),
            text,
            [self._tokenizer.id_to_token(i) or "" for i in unpack(data)] if request.want_pieces else [],
            begin_after=begin_after,
            reasoning_opened=opened,
            only_behind=self._unopened(request.reasoning_start, data) if begin_after and not opened else [],
            inner_end=self._tokenizer.token_to_id(request.inner_end) if request.inner_end else None,
            stop_token_ids=self._fill_in_middle.ends if request.suffix is not None else [],
            eos_token_ids=self._eos_token_ids(),
        )

    def _eos_token_ids(self) -> list[int]:
        """The id that ends answers, if the model has it."""
        found = self._eos_token_id
        return [] if found is None or found >= self.vocab_size else [found]

    def _around_hole(self, prefix: str, suffix: str, most: int, add_special_tokens: bool) -> list[int]:
        start = self._encode("", add_special_tokens, "prompt")
        chars = self._token_chars
        most_chars = 0 if chars is None or chars.whitespace_lost else chars.most
        return self._fill_in_middle.prompt(
            prefix, suffix, start, lambda text: self._encode(text, False, "prompt"), most, most_chars
        )

    def _open_reasoning(self, end: str, ids: bytes) -> list[int]:
        """Ids of the marker that ends reasoning. None where the prompt ends with it: the answer does not reason."""
        if not end or self._end_of(ids).endswith(end):
            return []
        return self._encode(end, False, "prompt")

    def _unopened(self, start: str, ids: bytes) -> list[int]:
        """Ids of the marker that begins reasoning. None where the prompt ends with it, or `start` is empty."""
        return self._encode(start, False, "prompt") if start and not self._end_of(ids).endswith(start.rstrip()) else []

    def _reasoning_opened(self, request: Tokenize, text: str | None, ids: bytes) -> bool | None:
        """True if the prompt ends with the marker that starts reasoning, False if with the one that ends it.

        A final message that the model continues is a part of the answer: the last marker counts, wherever it is.
        """
        if not request.reasoning_markers:
            return None
        start, end = request.reasoning_markers
        if request.continue_final_message:
            whole = self._text_of(ids) if text is None else text
            return bool(start) and whole.rfind(start) > whole.rfind(end)
        shown = self._end_of(ids)
        if shown.endswith(end.rstrip()):
            return False
        return True if start and shown.endswith(start.rstrip()) else None

    def _end_of(self, ids: bytes) -> str:
        """The end of a prompt, without whitespace behind it."""
        return self._text_of(ids[-4 * PROMPT_END_TOKENS :]).rstrip()

    def _most_chars(self, request: Tokenize) -> int | None:
        """Returns the most characters of a rendered prompt; None if unbounded, or if only the whole text can tell."""
        chars = self._token_chars
        if chars is None or chars.whitespace_lost or not request.max_tokens:
            return None
        return chars.most * request.max_tokens

    def _check_chars(self, text: str, max_tokens: int, field: str) -> None:
        """Rejects a text that must be too long before encoding it, which may take seconds."""
        if max_tokens and self._token_chars is not None and not self._token_chars.fits(text, max_tokens):
            fewest = self._token_chars.fewest_tokens(text)
            raise _too_long(fewest, f"{len(text)} characters in the {field}", max_tokens, field)

    def _chat(self, request: Tokenize, messages: bytes, marks: Marks) -> Chat:
        if request.chat_template is not None and not self._config.trust_request_chat_template:
            raise RequestError(
                "chat templates of requests are taken with --trust-request-chat-template alone", "chat_template"
            )
        parsed = _json(messages, list[dict[str, object]], "messages")
        return Chat(
            parsed,
            _json(request.tools or b"[]", list[object], "tools"),
            _json(request.template_kwargs or b"{}", dict[str, object], "chat_template_kwargs"),
            request.chat_template,
            request.add_generation_prompt,
            request.continue_final_message,
            request.content_format or self._config.chat_template_content_format,
            marks,
        )

    def _encode(self, text: str, add_special_tokens: bool, field: str) -> list[int]:
        try:  # encode_batch_fast computes no offsets: a sixth of the time
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as e:  # tokenizers raises it for a str that is not valid Unicode
            raise RequestError("the text has half a surrogate pair in it", field) from e
        return encoding.ids

    def _text_of(self, ids: bytes) -> str:
        return str(self._tokenizer.decode(unpack(ids), skip_special_tokens=False))

    def _check(self, ids: bytes, field: str) -> None:
        try:
            num_ids(ids)
        except ValueError as e:
            raise RequestError(str(e), field) from e
        outside = first_outside(ids, self.vocab_size)
        if outside is not None:
            raise RequestError(f"token id {outside} is outside the vocabulary of {self.vocab_size}", field)

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        """Returns the ids of each word at the start of a text and, if as long, after a space (as vLLM does)."""
        banned: list[list[int]] = []
        for word in words:
            if not word.strip():
                raise RequestError(f"a bad word must not be empty, got {word!r}", "bad_words")
            plain = self._encode(word.lstrip(), False, "bad_words")
            spaced = self._encode(" " + word.lstrip(), False, "bad_words")
            for ids in (plain, spaced):
                self._check(pack(ids), "bad_words")
            if plain:
                banned.append(plain)
            if plain and spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
                banned.append(spaced)
        return banned


def _adds_special(request: Tokenize) -> bool:
    return request.messages is None if request.add_special_tokens is None else request.add_special_tokens


def _too_long(num_tokens: int, what: str, max_tokens: int, field: str) -> RequestError:
    return RequestError(
        f"This model's maximum context length is {max_tokens} tokens. However, you requested {what}, which is more. "
        f"Please reduce the length of the {field}.",
        field,
        code="context_length_exceeded",
        too_long=TooLong(num_tokens, max_tokens),
    )


def _json(data: bytes, kind: type[T], field: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise RequestError(str(e), field) from e

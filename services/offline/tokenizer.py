"""The model's tokenizer with the interface of transformers' tokenizers, without importing transformers."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from tokenizers import Tokenizer

from blockyard.services.offline.session import Session
from blockyard.shared.errors import not_built
from blockyard.shared.messages import Tokenize
from blockyard.shared.token_ids import unpack
from blockyard.shared.tokenizer_files import TokenizerFiles

Conversation = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """Arguments of a chat template besides the messages."""

    tools: Sequence[Any] | None
    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    kwargs: Mapping[str, Any]


RenderTemplates = Callable[
    [Sequence[Conversation], TemplateOptions], list[tuple[str, list[int]]]
]  # text and ids of each


class BatchEncoding(dict[str, Any]):
    """`input_ids`, `attention_mask` and so on, by key or attribute: of one text, or lists for several."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as e:
            raise AttributeError(name) from e


class SpecialToken:
    """Descriptor of `eos_token` and the like: None if the model has none. May be set."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: "LLMTokenizer", kind: type | None = None) -> str | None:
        return owner.special_tokens_map.get(self._name)

    def __set__(self, owner: "LLMTokenizer", token: str | None) -> None:
        owner.special_tokens_map.pop(self._name, None)
        if token is not None:
            owner.special_tokens_map[self._name] = token


class SpecialTokenId:
    """Descriptor of `eos_token_id` and the like."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: "LLMTokenizer", kind: type | None = None) -> int | None:
        token = owner.special_tokens_map.get(self._name)
        return None if token is None else owner.backend_tokenizer.token_to_id(token)


class LLMTokenizer:
    """Runs in the caller's process, except chat templates, which the ring's tokenizer service renders."""

    bos_token, bos_token_id = SpecialToken("bos_token"), SpecialTokenId("bos_token")
    eos_token, eos_token_id = SpecialToken("eos_token"), SpecialTokenId("eos_token")
    pad_token, pad_token_id = SpecialToken("pad_token"), SpecialTokenId("pad_token")
    unk_token, unk_token_id = SpecialToken("unk_token"), SpecialTokenId("unk_token")
    is_fast = True

    def __init__(
        self, files: TokenizerFiles, name_or_path: str, model_max_length: int, render: RenderTemplates
    ) -> None:
        self.backend_tokenizer: Tokenizer = files.tokenizer
        self.special_tokens_map = dict(files.special_tokens)
        self.name_or_path, self.model_max_length = name_or_path, model_max_length
        self.padding_side = "right"
        self._templates, self._render = files.chat_templates, render

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """Without added tokens, as in transformers."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=False)

    @property
    def all_special_tokens(self) -> list[str]:
        added = self.backend_tokenizer.get_added_tokens_decoder().values()
        return list(dict.fromkeys([*self.special_tokens_map.values(), *(t.content for t in added if t.special)]))

    @property
    def all_special_ids(self) -> list[int]:
        return [self.convert_tokens_to_ids(token) for token in self.all_special_tokens]

    @property
    def chat_template(self) -> str | None:
        return self._templates.get("default")

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def __call__(
        self,
        text: str | Sequence[str],
        text_pair: str | None = None,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_attention_mask: bool | None = None,
        return_offsets_mapping: bool = False,
    ) -> BatchEncoding:
        """Raises RequestError, a ValueError, if tensors are requested: only lists are returned."""
        if return_tensors is not None:
            raise not_built("return_tensors", "make a tensor of input_ids")
        texts = [text] if isinstance(text, str) else list(text)
        if text_pair is not None and len(texts) != 1:
            raise ValueError("text_pair is for one text")
        found = [self.backend_tokenizer.encode(t, text_pair, add_special_tokens=add_special_tokens) for t in texts]
        most = self._length(truncation, max_length)
        ids = [one.ids[:most] for one in found]
        width = self._width(padding, max_length, ids)
        out: dict[str, list[Any]] = {"input_ids": [self._pad(row, width, self.pad_token_id or 0) for row in ids]}
        if return_attention_mask is not False:
            out["attention_mask"] = [self._pad([1] * len(row), width, 0) for row in ids]
        if return_offsets_mapping:
            out["offset_mapping"] = [one.offsets[:most] for one in found]
        return BatchEncoding({key: rows[0] if isinstance(text, str) else rows for key, rows in out.items()})

    def encode(
        self,
        text: str,
        text_pair: str | None = None,
        add_special_tokens: bool = True,
        truncation: bool | str | None = None,
        max_length: int | None = None,
    ) -> list[int]:
        ids: list[int] = self(
            text, text_pair, add_special_tokens=add_special_tokens, truncation=truncation, max_length=max_length
        )["input_ids"]
        return ids

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).tokens

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Converts one token or a list; an unknown token becomes the id of `unk_token`."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self.backend_tokenizer.token_to_id(tokens)
        return self.unk_token_id if found is None else found

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        left_out = self.all_special_ids if skip_special_tokens else ()
        return [self.backend_tokenizer.id_to_token(i) for i in ids if i not in left_out]

    def apply_chat_template(
        self,
        conversation: Conversation | Sequence[Conversation],
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Returns the text, or with `tokenize` its ids; for several conversations a list. Raises RequestError.

        `kwargs` are passed to the template.
        """
        if kwargs.pop("return_tensors", None) is not None:
            raise not_built("return_tensors", "make a tensor of the ids")
        if documents is not None:
            kwargs["documents"] = list(documents)
        single = bool(conversation) and isinstance(conversation[0], Mapping)
        asked: Any = [conversation] if single else conversation
        how = TemplateOptions(tools, chat_template, add_generation_prompt, continue_final_message, kwargs)
        done = self._render(asked, how)
        if not tokenize:
            return done[0][0] if single else [text for text, _ in done]
        rows = [ids for _, ids in done]
        if not return_dict:
            return rows[0] if single else rows
        columns = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
        return BatchEncoding({key: values[0] if single else values for key, values in columns.items()})

    def _length(self, truncation: bool | str | None, max_length: int | None) -> int | None:
        if truncation in (None, False, "do_not_truncate"):
            return None
        return self.model_max_length if max_length is None else max_length

    def _width(self, padding: bool | str, max_length: int | None, rows: list[list[int]]) -> int:
        if padding in (False, "do_not_pad"):
            return 0
        if self.pad_token_id is None:
            raise ValueError("padding needs a pad_token: tokenizer.pad_token = tokenizer.eos_token")
        if padding == "max_length":
            return self.model_max_length if max_length is None else max_length
        return max(map(len, rows), default=0)

    def _pad(self, row: list[int], width: int, fill: int) -> list[int]:
        padding = [fill] * (width - len(row))
        return padding + row if self.padding_side == "left" else row + padding


def through_ring(session: Session) -> RenderTemplates:
    """Returns a renderer with the templates, settings and limits of `chat`. It raises RingLost after `close`."""

    def render(conversations: Sequence[Conversation], how: TemplateOptions) -> list[tuple[str, list[int]]]:
        works = [
            Tokenize(
                "",
                session.card.names[0],
                messages=msgspec.json.encode(list(messages)),
                tools=msgspec.json.encode(list(how.tools)) if how.tools else b"",
                template_kwargs=msgspec.json.encode(dict(how.kwargs)) if how.kwargs else b"",
                chat_template=how.chat_template,
                add_generation_prompt=how.add_generation_prompt,
                continue_final_message=how.continue_final_message,
                want_text=True,
            )
            for messages in conversations
        ]
        name = f"template-{secrets.token_hex(8)}"
        done = session.call(lambda client: client.tokenizer_client.tokenize(works, name))
        return [(answer.text, unpack(answer.token_ids)) for answer in done]

    return render

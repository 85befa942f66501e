"""A checked request to a pooling model: its call of the ring and the form of its answer."""

from collections.abc import Sequence

import msgspec

from blockyard.shared.messages import ModelCard, PoolingParams, Tokenize
from blockyard.shared.ring_client.pooling.calls import PoolingCall, PoolingInput
from blockyard.shared.ring_client.pooling.pair_scores import Pairs


class PoolingAnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the HTTP answer looks; nothing here reaches a scheduler."""

    answer_id: str
    created: int
    model: str
    formats: tuple[str, ...] = ("float",)  # of vectors: float, base64; several only in Cohere's API
    top_n: int | None = None  # of the best documents that are returned; None: all
    shows_documents: bool = False
    prompt_tokens_details: bool = False  # in usage


class TokenIds(msgspec.Struct, frozen=True):
    """A text that is given as ids, as in frames."""

    data: bytes


class PairTexts(msgspec.Struct, frozen=True, kw_only=True):
    """The pairs of texts of a request: see `Pairs`."""

    firsts: list[str]
    seconds: list[str]
    first_field: str
    second_field: str
    first_is_single: bool
    second_is_single: bool
    compares: bool  # scores are the similarities of two vectors

    def pairs(self) -> Pairs:
        names = Pairs.__dataclass_fields__
        return Pairs(**{name: getattr(self, name) for name in names})


class PoolingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request. It has texts (or token ids as in frames), pairs of texts, or messages."""

    card: ModelCard
    options: PoolingAnswerOptions
    params: PoolingParams
    texts: list[str | TokenIds] = []
    field: str = "input"  # the name of the texts in errors
    is_single: bool = False  # there is one text, and not in a list
    pairs: PairTexts | None = None
    messages: Tokenize | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    max_first_tokens: int | None = None
    max_second_tokens: int | None = None
    add_special_tokens: bool | None = None
    prompt_name: str | None = None
    instruction: str | None = None
    priority: int = 0
    user: str = ""
    cache_salt: str = ""
    batch_line: bool = False

    def inputs(self) -> list[PoolingInput]:
        """The texts as a call has them."""
        return [text.data if isinstance(text, TokenIds) else text for text in self.texts]

    def call(self, inputs: Sequence[PoolingInput], request_id: str, tenant: str) -> PoolingCall:
        """Returns the call of the ring for these inputs."""
        return PoolingCall(
            request_id=request_id,
            model=self.card.names[0],
            inputs=inputs,
            params=self.params,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
            max_first_tokens=self.max_first_tokens,
            max_second_tokens=self.max_second_tokens,
            add_special_tokens=self.add_special_tokens is not False,
            prompt_name=self.prompt_name,
            instruction=self.instruction,
            priority=self.priority,
            tenant=tenant,
            user=self.user,
            cache_salt=self.cache_salt,
            batch_line=self.batch_line,
            field=self.field,
            is_single=self.is_single,
        )

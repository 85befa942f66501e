"""What a client asks of a pooling model, and what it gets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from blockyard.shared.messages import ModelCard, PoolingParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DEFAULT_PARAMS = PoolingParams()
FLOAT_BYTES = 4
WHOLE_LENGTH = -1  # as `truncate_prompt_tokens`: the model's length


class TextPair(NamedTuple):
    """Two texts that a model reads together."""

    first: str
    second: str


PoolingInput = str | TextPair | bytes | list[int]  # bytes: token ids as in frames


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingCall:
    """Many inputs with one set of parameters. Kinds of inputs may be mixed."""

    request_id: str
    model: str | None  # None: the only one there is
    inputs: Sequence[PoolingInput]
    params: PoolingParams = DEFAULT_PARAMS
    # Longer inputs are cut to so many tokens, special ones included; None: they are errors. WHOLE_LENGTH: the model's.
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None  # "left" keeps the end, "right" the beginning; None: "right"
    max_first_tokens: int | None = None  # of the first text of a pair, cut before special tokens are added
    max_second_tokens: int | None = None
    add_special_tokens: bool = True
    prompt_name: str | None = None  # None: the model's default prompt, if it has one; "": no prompt
    instruction: str | None = None  # for a model with a template of pairs
    priority: int = 0
    tenant: str = ""
    user: str = ""
    cache_salt: str = ""
    batch_line: bool = False
    # Names of the inputs in errors: `input[17]`, of pairs `first[17]` or `second[17]` by the text that is wrong.
    # With `is_single` there is one input, and the name has no index.
    field: str = "input"
    first_field: str = ""  # empty: as `field`
    second_field: str = ""
    is_single: bool = False
    check_room: Callable[[], None] | None = None  # raises RequestError if its texts may not be sent into the ring now


class PooledText(msgspec.Struct, frozen=True, gc=False):
    """The result of one input: float32 numbers in a shape of one or two dimensions.

    The garbage collector does not visit it: collections took half of the CPU time of a call with many thousand texts.
    """

    raw: bytes  # the numbers, little-endian
    width: int  # of a row; 0: there are no rows
    num_tokens: int  # of the input, with special tokens
    token_ids: bytes = b""  # of the input, as in frames
    cached_tokens: int = 0  # of the input, found in the prefix cache

    @property
    def shape(self) -> tuple[int, ...]:
        count = len(self.raw) // FLOAT_BYTES
        return (count // self.width, self.width) if self.width else (count,)

    @property
    def data(self) -> "npt.NDArray[np.float32]":
        """The numbers as an array, without a copy."""
        # only answers that compute with numbers need numpy: it takes a gateway 20 MB and its start 0.1 s
        import numpy as np  # noqa: PLC0415

        return np.frombuffer(self.raw, "<f4").reshape(self.shape)


@dataclass(frozen=True, slots=True)
class PooledAnswer:
    """The results of all inputs, in order."""

    card: ModelCard
    items: list[PooledText] = field(default_factory=list)

    @property
    def cached_tokens(self) -> int:
        return sum(item.cached_tokens for item in self.items)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)

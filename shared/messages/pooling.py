"""Pooling: texts to token ids, many prompts in one request, and their vectors, scores and classes."""

import enum

from blockyard.shared.messages.base import Frame, FrameStruct


class PoolingTask(enum.StrEnum):
    """What a request asks of a pooling model, and what a model serves."""

    EMBED = "embed"  # a vector of a text
    CLASSIFY = "classify"  # a number for each label
    SCORE = "score"  # one number, of a text or a pair of texts
    REWARD = "reward"  # of a sequence, of its tokens, or of the steps of a solution
    ENCODE = "encode"  # whatever the model's own task makes; of requests only


class PoolingParams(FrameStruct, frozen=True):
    """How the results of one request are made. None: as the model's settings say."""

    task: PoolingTask = PoolingTask.ENCODE
    dimensions: int | None = None  # the first so many numbers, cut before they are normalized
    normalize: bool | None = None
    use_activation: bool | None = None  # False: logits in place of scores or probabilities
    softmax: bool | None = None  # of classes or of a step's tokens; False: no function at all
    pooling_type: str | None = None  # CLS, LAST, MEAN, ALL or STEP, in any case
    step_tag_id: int | None = None  # with STEP: the token that ends a step
    returned_token_ids: list[int] | None = None  # the outputs that are kept, before the function


class PooledStart(FrameStruct, frozen=True):
    """scheduler -> worker: how the result of a slot is made."""

    params: PoolingParams = PoolingParams()
    second_start: int | None = None  # where the second text of a pair begins; None: tokens have no types
    skip: int = 0  # leading tokens that are not pooled


class TokenizeTexts(Frame, frozen=True):
    """api_gateway -> tokenizer_pool: turns many texts, or pairs of texts, into ids."""

    request_id: str
    model: str
    texts: list[str]
    seconds: list[str] = []  # the second text of each pair; empty: there are no pairs
    max_tokens: int = 0  # of a text or pair with its special tokens; 0: no limit
    truncate: bool = False  # longer ones are cut; False: each is an error
    truncates_left: bool = False  # keeps the end of a text
    max_first_tokens: int = 0  # of the first text of a pair, cut before special tokens are added; 0: no limit
    max_second_tokens: int = 0
    add_special_tokens: bool = True
    prompt: str = ""  # goes before each text, before the first one of a pair
    counts_prompt: bool = False  # the answer says how many leading tokens are the prompt's
    instruction: str | None = None  # for a template of pairs, if the model has one
    tenant: str = ""  # as in Tokenize
    quick: bool = False


class TextError(FrameStruct, frozen=True):
    """Why one text has no ids."""

    index: int  # in the frame
    message: str
    is_second: bool = False  # it is the second text of its pair
    code: str = ""  # OpenAI's error code
    num_tokens: int = 0  # as in TextRejected
    max_tokens: int = 0


class TextsTokenized(Frame, frozen=True):
    """Ids of all texts of a TokenizeTexts, in order. A text with an error has no ids."""

    request_id: str
    token_ids: bytes  # of all texts, one behind the other
    lengths: bytes  # uint32: tokens of each text
    second_starts: bytes = b""  # uint32: where the second text of each pair begins; empty: no token has a type
    skip: int = 0  # leading tokens of each text that are the prompt's
    errors: list[TextError] = []


class Pool(Frame, frozen=True):
    """api_gateway -> scheduler: many prompts with one set of parameters. A later attempt has the missing ones alone."""

    request_id: str
    attempt: int
    model: str
    token_ids: bytes  # of all prompts, one behind the other
    lengths: bytes  # uint32: tokens of each prompt
    indexes: bytes  # uint32: the place of each prompt in its request; they identify it over all attempts
    params: PoolingParams = PoolingParams()
    second_starts: bytes = b""  # uint32, as in TextsTokenized
    skip: int = 0  # leading tokens that are not pooled
    priority: int = 0  # lower is earlier
    tenant: str = ""
    user: str = ""  # divides the tenant's share
    batch_line: bool = False  # as in Generate
    cache_salt: str = ""
    # A call may be sent in parts, each with an id of its own. The first part stands for all before the queue's bounds.
    later_prompts: int = 0  # of the parts that follow
    later_tokens: int = 0  # of these, about
    is_later: bool = False  # a part that follows


class VectorFailure(FrameStruct, frozen=True):
    """A prompt of a Pool that has no result."""

    index: int
    detail: str
    status: int = 500  # as in TokenStep


class VectorBlock(FrameStruct, frozen=True):
    """Results of one step for one Pool. Each is sent once an attempt."""

    request_id: str
    attempt: int
    indexes: bytes  # uint32: of the prompts
    lengths: bytes  # uint32: numbers in the result of each
    data: bytes  # float32, little-endian: all results, one behind the other
    width: int = 0  # numbers of a row, if a result has rows (a vector for each of several tokens); 0: it has none
    cached_tokens: bytes = b""  # uint32: of each prompt, tokens found in the prefix cache; empty: none were found
    failures: list[VectorFailure] = []
    queued_s: float = 0.0  # how long the prompts waited to be scheduled, at most


class PackedPart(FrameStruct, frozen=True):
    """Neighbouring texts of a packed step with results that are made alike."""

    count: int
    params: PoolingParams = PoolingParams()
    skip: int = 0  # leading tokens of each text that are not pooled
    second_starts: bytes = b""  # uint32: as in TextsTokenized


class PackedStep(FrameStruct, frozen=True):
    """scheduler -> worker: the texts that a model without KV computes in one step, each whole."""

    token_ids: bytes  # of all texts, one behind the other
    lengths: bytes  # uint32: tokens of each text
    parts: list[PackedPart]  # all texts, in order


class PackedVectors(FrameStruct, frozen=True):
    """worker -> scheduler: the results of a packed step."""

    lengths: bytes  # uint32: numbers in the result of each text, in order; 0 for one that failed
    data: bytes  # float32, little-endian: all results, one behind the other
    widths: list[int]  # of each part, as in VectorBlock
    failures: list[VectorFailure] = []  # `index` is the place in the step


class NamedPrompt(FrameStruct, frozen=True):
    """A text that goes before a text, such as `query: `."""

    name: str
    text: str


class PoolingCard(FrameStruct, frozen=True):
    """What a pooling model serves and how. Gateways validate requests against it."""

    task: PoolingTask  # never ENCODE
    width: int  # numbers of a result, or of each row of it
    max_len: int  # tokens of a text
    labels: list[str] = []  # of a classifier, by index
    pooling: str = ""  # vLLM's name of the model's own pooling, in capitals
    of_tokens: bool = False  # results have rows
    normalizes: bool = False
    is_matryoshka: bool = False  # any smaller number of dimensions may be asked for ...
    dimensions: list[int] = []  # ... or these; both empty: only `width`
    similarity: str = "cosine"  # of two vectors: cosine, dot, euclidean, manhattan
    prompts: list[NamedPrompt] = []
    default_prompt_name: str | None = None
    include_prompt: bool = True  # tokens of a prompt are pooled
    takes_pairs: bool = False  # scores are computed of a pair of texts, not of two vectors
    has_pair_template: bool = False  # a pair is rendered to one text, with an instruction if there is one
    has_types: bool = False  # tokens of the second text of a pair have a type
    has_kv: bool = False  # a decoder: it has a KV cache
    is_lower_case: bool = False  # texts are made lower case before they are tokenized
    writes_messages: bool = False  # each text is written by the chat template
    joins_dense: bool = False  # dense layers read the vectors of several modes, joined: no other mode makes their input

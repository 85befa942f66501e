"""`SamplingParams` with vLLM's fields, and their validation."""

import copy
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from blockyard.shared.errors import RequestError, not_built
from blockyard.shared.messages import (
    DEFAULT_SAMPLING,
    Grammar,
    GrammarDefaults,
    RepetitionDetection,
    Sampling,
    SamplingDefaults,
    TextOptions,
)
from blockyard.shared.ring_client.request_fields import limits
from blockyard.shared.ring_client.request_fields.choices import Choices, read_choices
from blockyard.shared.ring_client.request_fields.engine_fields import (
    RepetitionDetectionParams,
    read_kv_transfer_params,
    read_logprob_ids,
    read_repetition,
    read_xargs,
)
from blockyard.shared.ring_client.request_fields.logits_processors import read_logits_processors
from blockyard.shared.ring_client.request_fields.sampling_fields import (
    read_bad_words,
    read_sampling,
    read_text_options,
    read_truncation,
)
from blockyard.shared.ring_client.request_fields.structured_outputs import (
    FieldGrammar,
    StructuredOutputsParams,
    read_structured_outputs,
)

DEFAULT_GRAMMARS = GrammarDefaults()
UNKNOWN_VOCAB = 2**32 - 1  # ids that fit a frame
UNSEEDED = -1  # seed
CONNECTOR = "kv_transfer_params"  # in `extra_args`
GuidedDecodingParams = StructuredOutputsParams  # its older name

# fields of vLLM that are not supported -> values without an effect
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "flat_logprobs": (False,),
    "thinking_token_budget": (None,),
}


class RequestOutputKind(enum.Enum):
    """The outputs that an engine returns for an unfinished request; `LLM` always returns finished ones."""

    CUMULATIVE = 0  # each output has everything so far
    DELTA = 1  # each output has only the new part
    FINAL_ONLY = 2  # nothing before the end


class SamplingParams(msgspec.Struct):
    """Raises RequestError, a ValueError, for a value out of range; `generate` checks again.

    Positional arguments are in vLLM's order. Numbers and lists may be numpy's.
    """

    n: int = 1
    presence_penalty: float = DEFAULT_SAMPLING.presence_penalty
    frequency_penalty: float = DEFAULT_SAMPLING.frequency_penalty
    repetition_penalty: float = DEFAULT_SAMPLING.repetition_penalty
    temperature: float = DEFAULT_SAMPLING.temperature  # 0 is greedy
    top_p: float = DEFAULT_SAMPLING.top_p
    top_k: int = DEFAULT_SAMPLING.top_k  # 0 and -1 are all
    min_p: float = DEFAULT_SAMPLING.min_p
    seed: int | None = None  # None and -1: derived from the LLM's own `seed`
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = DEFAULT_SAMPLING.ignore_eos
    max_tokens: int | None = DEFAULT_SAMPLING.max_tokens  # None: up to the context length
    min_tokens: int = DEFAULT_SAMPLING.min_tokens
    logprobs: int | None = None  # number of candidates besides the sampled token; -1: all, True: 1
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None  # candidates in place of the likeliest ones; `logprobs` may be left out
    flat_logprobs: bool = False  # refused by name
    detokenize: bool = True  # False: token ids only
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # of LLMEngine and AsyncLLMEngine
    structured_outputs: Any = None  # StructuredOutputsParams, or a dict of its fields
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None  # of logits processors; `kv_transfer_params` in it is the connector's
    bad_words: list[str] | None = None
    thinking_token_budget: Any = None  # refused by name
    repetition_detection: RepetitionDetectionParams | None = None  # or a dict of its fields
    # no longer, or never, in vLLM
    best_of: int | None = None  # number of computed choices, of which the n most likely are returned
    use_beam_search: bool = False
    length_penalty: float = 1.0  # of a beam search
    early_stopping: bool | str = False  # of a beam search; or "never"
    truncate_prompt_tokens: int | None = None  # number of the prompt's last tokens to keep; -1: as many as fit
    guided_decoding: Any = None  # older name of structured_outputs
    logits_processors: Any = None  # importable functions, their names, or {"qualname", "args", "kwargs"}

    def __post_init__(self) -> None:
        if self.seed == UNSEEDED:
            self.seed = None
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                setattr(self, name, 1)
        read(self)

    @staticmethod
    def from_optional(**fields: Any) -> "SamplingParams":
        """Builds parameters from fields that may be None, which is the default; logit_bias is clamped to +-100."""
        given = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
        if (bias := given.get("logit_bias")) is not None:
            try:
                given["logit_bias"] = {int(token): min(100.0, max(-100.0, value)) for token, value in bias.items()}
            except (TypeError, ValueError) as e:
                raise RequestError(f"logit_bias: {e}", "logit_bias") from e
        return SamplingParams(**given)

    def clone(self) -> "SamplingParams":
        return copy.deepcopy(self)


@dataclass(frozen=True, slots=True)
class CheckedParams:
    """SamplingParams after validation."""

    sampling: Sampling  # max_tokens, seed and bad words are set once the prompt is tokenized
    text: TextOptions
    choices: Choices
    seed: int | None
    max_tokens: int | None
    truncate: int | None
    bad_words: list[str]
    detokenize: bool
    num_logprobs: int | None  # shown in outputs
    grammar: Grammar | None = None  # of structured output
    kv_transfer_params: bytes = b""  # JSON object, for the connector


def read(
    params: SamplingParams,
    vocab_size: int | None = None,
    max_logprobs: int | None = None,
    grammars: GrammarDefaults = DEFAULT_GRAMMARS,
    processors: Sequence[str] = (),
) -> CheckedParams:
    """Validates `params`. Raises RequestError. Without `vocab_size` and `max_logprobs`, skips the model's limits.

    grammars, processors: of the deployment's flags.
    """
    _check_types(params)
    for name, harmless in UNSUPPORTED.items():
        if getattr(params, name) not in harmless:
            raise not_built(name)
    if not params.detokenize and params.stop:
        raise RequestError("stop strings need text: detokenize must be true", "stop")
    most = limits.ALL_LOGPROBS if max_logprobs is None else max_logprobs
    num_logprobs, of_prompt = (
        limits.num_logprobs(name, getattr(params, name), most, UNKNOWN_VOCAB if vocab_size is None else vocab_size)
        for name in ("logprobs", "prompt_logprobs")
    )
    limits.integer("max_tokens", params.max_tokens, 1, 1)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, more than max_tokens, {params.max_tokens}", "min_tokens"
        )
    sampling, choices = read_sampling(params, vocab_size, SamplingDefaults()), read_choices(params)
    if choices.beam is not None and params.prompt_logprobs is not None:
        raise RequestError("log-probabilities of the prompt are not part of a beam search", "prompt_logprobs")
    grammar = _read_grammar(params, grammars)
    if choices.beam is not None and grammar is not None:
        raise RequestError(f"a beam search cannot be limited by {grammar.field}", grammar.field)
    named = read_logits_processors(_processor_names(params.logits_processors), ".*", processors)
    if choices.beam is not None and named:
        raise RequestError("a beam search has no logits processors", "logits_processors")
    repetition = _read_repetition(params, choices)
    extra, connector = _read_extra_args(params.extra_args)
    listed = _read_listed(params, choices, vocab_size)
    if listed:
        num_logprobs = len(listed)
    return CheckedParams(
        sampling=choices.sampling(
            msgspec.structs.replace(
                sampling,
                num_logprobs=0 if listed else num_logprobs,
                num_prompt_logprobs=of_prompt,
                logits_processors=named,
                extra_args=extra,
                logprob_token_ids=listed,
            )
        ),
        text=msgspec.structs.replace(read_text_options(params), repetition=repetition),
        choices=choices,
        seed=params.seed,
        max_tokens=params.max_tokens,
        truncate=read_truncation(params),
        bad_words=read_bad_words(params),
        detokenize=params.detokenize,
        num_logprobs=num_logprobs,
        grammar=grammar.grammar if grammar is not None else None,
        kv_transfer_params=connector,
    )


def _read_listed(params: SamplingParams, choices: Choices, vocab_size: int | None) -> list[int]:
    listed = read_logprob_ids(params.logprob_token_ids, True, vocab_size)
    if choices.beam is not None and listed:
        raise RequestError("a beam search has no logprob_token_ids", "logprob_token_ids")
    return listed


def _read_repetition(params: SamplingParams, choices: Choices) -> RepetitionDetection | None:
    repetition = read_repetition(params.repetition_detection)
    if choices.beam is not None and repetition is not None:
        raise RequestError("a beam search has no repetition_detection", "repetition_detection")
    return repetition


def _read_extra_args(given: dict[str, Any] | None) -> tuple[bytes, bytes]:
    """JSON for logits processors, and for the connector of KV transfers, as vLLM has both in one field."""
    left = dict(given or {})
    connector = read_kv_transfer_params(plain(left.pop(CONNECTOR, None)), f"extra_args.{CONNECTOR}")
    return read_xargs(plain(left), "extra_args"), connector


def _read_grammar(params: SamplingParams, defaults: GrammarDefaults) -> FieldGrammar | None:
    found = read_structured_outputs(params.structured_outputs, defaults)
    older = read_structured_outputs(params.guided_decoding, defaults, "guided_decoding")
    if found is not None and older is not None:
        raise RequestError("structured_outputs and guided_decoding are one setting: leave one out", "guided_decoding")
    return found or older


def _processor_names(value: object) -> object:
    """Replaces functions and classes in a list by names that the worker, another process, can import."""
    if not isinstance(value, list | tuple):
        return value
    return [_name(one) if callable(one) else one for one in value]


def _name(processor: object) -> str:
    module, name = getattr(processor, "__module__", ""), getattr(processor, "__qualname__", "")
    if module in ("", "__main__") or not name or "<" in name:
        raise RequestError(
            f"logits_processors: {processor!r} is in no module that the worker can import; put it in a file of its own",
            "logits_processors",
        )
    return f"{module}.{name}"


def _check_types(params: SamplingParams) -> None:
    """Checks field types, since Python does not, and converts tuples to lists, ints to floats, numpy's numbers."""
    for field in msgspec.structs.fields(SamplingParams):
        value = getattr(params, field.name)
        if isinstance(value, RequestOutputKind):
            continue
        try:
            try:
                converted = msgspec.convert(value, field.type)
            except msgspec.ValidationError:
                converted = msgspec.convert(plain(value), field.type)
        except msgspec.ValidationError as e:
            raise RequestError(f"{field.name}: {e}", field.name) from e
        setattr(params, field.name, converted)


def plain(value: Any) -> Any:
    """Converts arrays and numbers of numpy or torch, also in lists, tuples and dicts, without importing either."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    return value

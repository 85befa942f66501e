"""The sampling and text fields of a request, checked against their ranges and the model's vocabulary."""

from blockyard.services.api_gateway.errors import ApiError
from blockyard.services.api_gateway.schemas import GenerationFields
from blockyard.shared.config.gateway import SamplingDefaults
from blockyard.shared.messages import ModelCard, Sampling, TextOptions
from blockyard.shared.ring_client import limits

SEED_LOW, SEED_HIGH = -(2**63), 2**64 - 1  # as signed or as unsigned


def read_sampling(request: GenerationFields, card: ModelCard, defaults: SamplingDefaults) -> Sampling:
    """All but max_tokens, the seed, bad words and the numbers of log-probabilities. Raises ApiError."""
    vocab = card.vocab_size
    allowed = request.allowed_token_ids
    if allowed is not None and not allowed:
        raise ApiError("allowed_token_ids is empty: no token would be left", "allowed_token_ids")
    stop_ids = request.stop_token_ids or []
    limits.short("stop_token_ids", stop_ids, limits.MAX_LISTED)
    top_k = limits.integer("top_k", request.top_k, defaults.top_k, -1)
    limits.integer("seed", request.seed, 0, SEED_LOW, SEED_HIGH)
    return Sampling(
        max_tokens=1,
        temperature=limits.number("temperature", request.temperature, defaults.temperature, 0.0, 100.0),
        top_k=0 if top_k <= 0 or top_k >= vocab else top_k,
        top_p=limits.number("top_p", request.top_p, defaults.top_p, 0.0, 1.0, above_low=True),
        min_p=limits.number("min_p", request.min_p, defaults.min_p, 0.0, 1.0),
        repetition_penalty=limits.number(
            "repetition_penalty", request.repetition_penalty, defaults.repetition_penalty, 0.0, 100.0, above_low=True
        ),
        presence_penalty=limits.number("presence_penalty", request.presence_penalty, 0.0, -2.0, 2.0),
        frequency_penalty=limits.number("frequency_penalty", request.frequency_penalty, 0.0, -2.0, 2.0),
        min_tokens=limits.integer("min_tokens", request.min_tokens, 0, 0),
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=limits.token_ids("stop_token_ids", stop_ids, vocab),
        logit_bias=limits.logit_bias(request.logit_bias, vocab),
        allowed_token_ids=sorted(set(limits.token_ids("allowed_token_ids", allowed or [], vocab))),
    )


def read_text_options(request: GenerationFields, tokens_as_ids: bool) -> TextOptions:
    """`tokens_as_ids` is the deployment's default."""
    asked = request.return_tokens_as_token_ids
    return TextOptions(
        stop=limits.stop_strings(request.stop),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        spaces_between_special_tokens=request.spaces_between_special_tokens is not False,
        tokens_as_ids=tokens_as_ids if asked is None else asked,
        min_tokens=request.min_tokens or 0,
    )


def read_bad_words(request: GenerationFields) -> list[str]:
    words = request.bad_words or []
    limits.short("bad_words", words, limits.MAX_LISTED)
    for word in words:
        if not word or len(word) > limits.MAX_STOP_CHARS:
            raise ApiError(f"each bad word has 1 to {limits.MAX_STOP_CHARS} characters, got {len(word)}", "bad_words")
    return words


def read_salt(request: GenerationFields) -> str:
    salt = request.cache_salt
    if salt is None:
        return ""
    if not 1 <= len(salt) <= limits.MAX_SALT_CHARS:
        raise ApiError(f"cache_salt has 1 to {limits.MAX_SALT_CHARS} characters, got {len(salt)}", "cache_salt")
    return salt

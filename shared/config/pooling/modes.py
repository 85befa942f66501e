"""The ways to make one vector, or one for each token, of the hidden states of a sequence."""

import enum

from blockyard.shared.errors import ConfigError


class PoolingMode(enum.StrEnum):
    """Values are as in sentence-transformers, where it has the mode."""

    CLS = "cls"  # the first token
    LAST = "lasttoken"
    MEAN = "mean"
    MAX = "max"  # of each number over all tokens
    MEAN_SQRT_LEN = "mean_sqrt_len_tokens"  # the sum, divided by the square root of the number of tokens
    WEIGHTED_MEAN = "weightedmean"  # the weight of a token is its position, from 1
    ALL = "all"  # a vector for each token
    STEP = "step"  # a vector for each token that ends a step of a solution

    @property
    def is_of_tokens(self) -> bool:
        """Whether the result is a vector for each of several tokens."""
        return self in (PoolingMode.ALL, PoolingMode.STEP)


VLLM_NAMES = {
    "CLS": PoolingMode.CLS,
    "LAST": PoolingMode.LAST,
    "MEAN": PoolingMode.MEAN,
    "ALL": PoolingMode.ALL,
    "STEP": PoolingMode.STEP,
}
OF_SENTENCES = tuple(mode for mode in PoolingMode if not mode.is_of_tokens)


def read_vllm_name(name: object, where: str) -> PoolingMode:
    """Returns the mode of vLLM's name in any case. where: names the field in the message of ConfigError."""
    found = VLLM_NAMES.get(name.upper()) if isinstance(name, str) else None
    if found is None:
        raise ConfigError(f"{where} {name!r} is not one of {', '.join(VLLM_NAMES)}")
    return found

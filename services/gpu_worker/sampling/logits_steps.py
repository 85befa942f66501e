"""The steps from a model's logits to a token, declared once, in the order in which they apply.

`host_steps` and `device_steps` implement every entry under its name. The order is vLLM's: allowed and banned tokens and
bias, then penalties, then temperature and truncation.
"""

from collections.abc import Callable
from dataclasses import dataclass

from blockyard.shared.messages import Sampling

IsValid = Callable[[float], bool]


@dataclass(frozen=True, slots=True)
class LogitsStep:
    """One step, and the `Sampling` parameters that it reads with a check of each one's range."""

    name: str
    parameters: dict[str, IsValid]
    token_ids: Callable[[Sampling], list[int]] | None = None  # ids that its parameters name


def any_value(value: object) -> bool:
    return True


def is_finite(value: float) -> bool:
    return abs(value) < float("inf")


def _marker(asked: Sampling) -> list[int]:
    if (constraint := asked.constraint) is None:
        return []
    return constraint.begin_after if constraint.inner_end is None else [*constraint.begin_after, constraint.inner_end]


LOGITS_STEPS = (
    LogitsStep("logits_processors", {"logits_processors": any_value}),
    LogitsStep("constraint", {"constraint": any_value}, _marker),
    LogitsStep("allowed_token_ids", {"allowed_token_ids": any_value}, lambda asked: asked.allowed_token_ids),
    LogitsStep("bad_words", {"bad_words": any_value}, lambda asked: [i for words in asked.bad_words for i in words]),
    LogitsStep("min_tokens", {"min_tokens": any_value}),
    LogitsStep("logit_bias", {"logit_bias": any_value}, lambda asked: [i for i, _ in asked.logit_bias]),
    LogitsStep(
        "penalties",
        {
            "repetition_penalty": lambda value: value > 0,
            "presence_penalty": is_finite,
            "frequency_penalty": is_finite,
        },
    ),
    LogitsStep("temperature", {"temperature": lambda value: value >= 0}),
    LogitsStep("min_p", {"min_p": lambda value: 0 <= value <= 1}),
    LogitsStep("top_k", {"top_k": any_value}),
    LogitsStep("top_p", {"top_p": lambda value: 0 < value <= 1}),
)


def unsupported_reason(sampling: Sampling, vocab_size: int) -> str:
    """Why these parameters cannot be used; empty if they can. The gateway validates them; this keeps a step alive."""
    for step in LOGITS_STEPS:
        for token in step.token_ids(sampling) if step.token_ids else ():
            if not 0 <= token < vocab_size:
                return f"token id {token} is outside of the vocabulary of {vocab_size}"
    for step in LOGITS_STEPS:
        for name, is_valid in step.parameters.items():
            if not is_valid(value := getattr(sampling, name)):  # NaN is in no range
                return f"{name} cannot be {value}"
    return ""

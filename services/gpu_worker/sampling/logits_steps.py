"""The steps from a model's logits to a token, declared once, in the order in which they apply.

Each writes fields of a slot when it starts, and sampling reads them: kernels on a GPU (`kernels/sampling`),
`cpu_sampler` on the CPU, `host_rows` for slots that only the host can sample. The order is vLLM's: allowed and banned
tokens and bias, then penalties, then temperature and truncation.
"""

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from blockyard.kernels.slots.slot_state import Field
from blockyard.shared.messages import Sampling

IsValid = Callable[[float], bool]
TokenEdits = dict[int, tuple[float, int]]  # by token: bias, and below which index of a token it is banned


class SlotFields:
    """What the steps write for a starting slot: words of its fields, and edits of tokens."""

    def __init__(
        self, words: list[int], num_prompt_tokens: int, end_ids: list[int], vocab_size: int, mask_owner: int = 0
    ) -> None:
        """words: by `Field`. end_ids: what ends a sequence. mask_owner: of its masks, 0: the device has none."""
        self.words, self.num_prompt_tokens = words, num_prompt_tokens
        self.end_ids, self.vocab_size, self.mask_owner = end_ids, vocab_size, mask_owner
        self.only_listed = False  # all tokens without an edit are banned
        self.edits: TokenEdits = {}
        self.has_penalties = False

    def ban_unlisted(self) -> None:
        """Bans all tokens without an edit."""
        self.only_listed = True

    def set_penalties(self, repetition: float, presence: float, frequency: float) -> None:
        values = (repetition, presence, frequency)
        self.has_penalties = values != (1.0, 0.0, 0.0)
        self.words[Field.REPETITION], self.words[Field.PRESENCE], self.words[Field.FREQUENCY] = map(float_word, values)


def _logits_processors(slot: SlotFields, sampling: Sampling) -> bool:
    """The host samples slots with processors of users."""
    return not sampling.logits_processors


def _constraint(slot: SlotFields, sampling: Sampling) -> bool:
    """Without masks on the device the host samples slots with a constraint."""
    return sampling.constraint is None or slot.mask_owner != 0


def _allowed_token_ids(slot: SlotFields, sampling: Sampling) -> bool:
    if sampling.allowed_token_ids and sampling.constraint is None:  # they are in the mask
        slot.ban_unlisted()
        slot.edits.update(dict.fromkeys(sampling.allowed_token_ids, (0.0, 0)))
    return True


def _bad_words(slot: SlotFields, sampling: Sampling) -> bool:
    """The host samples slots with words of several tokens."""
    for words in sampling.bad_words:
        if len(words) == 1:
            slot.edits[words[0]] = (-math.inf, 0)
    return all(len(words) == 1 for words in sampling.bad_words)


def _min_tokens(slot: SlotFields, sampling: Sampling) -> bool:
    bans = bool(sampling.min_tokens) and sampling.constraint is None  # with a constraint they are in the mask
    for token in slot.end_ids if bans else ():
        if not slot.only_listed or token in slot.edits:
            bias, _ = slot.edits.get(token, (0.0, 0))
            slot.edits[token] = (bias, slot.num_prompt_tokens + sampling.min_tokens)
    return True


def _logit_bias(slot: SlotFields, sampling: Sampling) -> bool:
    for token, value in sampling.logit_bias:
        if not slot.only_listed or token in slot.edits:
            bias, until = slot.edits.get(token, (0.0, 0))
            slot.edits[token] = (bias + value, until)
    return True


def _penalties(slot: SlotFields, sampling: Sampling) -> bool:
    slot.set_penalties(sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return True


def _temperature(slot: SlotFields, sampling: Sampling) -> bool:
    slot.words[Field.TEMPERATURE] = float_word(sampling.temperature)
    return True


def _min_p(slot: SlotFields, sampling: Sampling) -> bool:
    slot.words[Field.MIN_P] = float_word(sampling.min_p)
    return True


def _top_k(slot: SlotFields, sampling: Sampling) -> bool:
    slot.words[Field.TOP_K] = sampling.top_k if 0 < sampling.top_k < slot.vocab_size else slot.vocab_size
    return True


def _top_p(slot: SlotFields, sampling: Sampling) -> bool:
    slot.words[Field.TOP_P] = float_word(sampling.top_p)
    return True


def _listed_logprobs(slot: SlotFields, sampling: Sampling) -> bool:
    """The host reports log-probabilities of chosen tokens: kernels know the likeliest ones alone."""
    return not sampling.logprob_token_ids


@dataclass(frozen=True, slots=True)
class LogitsStep:
    """One step, and the `Sampling` parameters that it reads with a check of each one's range."""

    write: Callable[[SlotFields, Sampling], bool]  # writes the slot's fields. False: the host has to sample the slot
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
    LogitsStep(_logits_processors, {"logits_processors": any_value, "extra_args": any_value}),
    LogitsStep(_constraint, {"constraint": any_value}, _marker),
    LogitsStep(_allowed_token_ids, {"allowed_token_ids": any_value}, lambda asked: asked.allowed_token_ids),
    LogitsStep(_bad_words, {"bad_words": any_value}, lambda asked: [i for words in asked.bad_words for i in words]),
    LogitsStep(_min_tokens, {"min_tokens": any_value}),
    LogitsStep(_logit_bias, {"logit_bias": any_value}, lambda asked: [i for i, _ in asked.logit_bias]),
    LogitsStep(
        _penalties,
        {
            "repetition_penalty": lambda value: value > 0,
            "presence_penalty": is_finite,
            "frequency_penalty": is_finite,
        },
    ),
    LogitsStep(_temperature, {"temperature": lambda value: value >= 0}),
    LogitsStep(_min_p, {"min_p": lambda value: 0 <= value <= 1}),
    LogitsStep(_top_k, {"top_k": any_value}),
    LogitsStep(_top_p, {"top_p": lambda value: 0 < value <= 1}),
    LogitsStep(_listed_logprobs, {"logprob_token_ids": any_value}, lambda asked: asked.logprob_token_ids),
)


def write_steps(slot: SlotFields, sampling: Sampling) -> bool:
    """Has all steps write to a starting slot. False: the host has to sample it."""
    return all([step.write(slot, sampling) for step in LOGITS_STEPS])  # a list: each step writes its words


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


@lru_cache(maxsize=4096)
def float_word(value: float) -> int:
    """The bits of a float32."""
    return array("i", array("f", (value,)).tobytes())[0]

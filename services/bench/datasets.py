"""Datasets: prompts with the number of output tokens of each. Pure apart from reading a ShareGPT file."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from blockyard.shared.errors import ConfigError

Prompt = str | list[int]

# Log-normal lengths, clipped as vLLM's and SGLang's benchmarks filter ShareGPT's first turns (4 to 1024 tokens in, at
# least 4 out, 2048 in total). The means are about 210 tokens in and 200 out.
SHAREGPT_IN = (5.05, 1.5)  # mean and deviation of the logarithm
SHAREGPT_OUT = (4.8, 1.1)
SHAREGPT_LEAST, SHAREGPT_MOST, SHAREGPT_TOTAL = 4, 1024, 2048
CHARS_PER_TOKEN = 4.0  # for servers without /tokenize
# Words that are one token in nearly every tokenizer trained on English.
_WORDS = """
    the of and to in is that for it as was with be by on not he his but at are this have from or had an they which
    one you were her all she there would their we him been has when who will more no if out so said what up its
    about into than them can only other new some could time these two may then do first any my now such like our
    over man
"""
WORDS = tuple(_WORDS.split())


@dataclass(frozen=True, slots=True)
class SampleRequest:
    prompt: Prompt
    num_input: int  # tokens; an estimate for text prompts
    num_output: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole numbers, uniform from `low` to `high`, both included."""

    low: int
    high: int

    def sample(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


def lengths(text: str, range_ratio: float, where: str) -> Lengths:
    """`512` with a ratio of r is 512·(1-r) to 512·(1+r), as in vLLM; `100:1024` is the range itself."""
    low, colon, high = text.partition(":")
    if not low.isdecimal() or (colon and not high.isdecimal()):
        raise ConfigError(f"{where} {text}: expected a number of tokens, or a range such as 100:1024")
    if not colon:
        middle = int(low)
        found = Lengths(max(1, math.floor(middle * (1 - range_ratio))), math.ceil(middle * (1 + range_ratio)))
    else:
        found = Lengths(int(low), int(high))
    if not 1 <= found.low <= found.high:
        raise ConfigError(f"{where} {text}: expected at least 1, and a range to rise")
    return found


class RandomIds:
    """Makes prompts of random token ids in [low, high)."""

    def __init__(self, low: int, high: int) -> None:
        self._ids = range(low, high)

    def __call__(self, rng: random.Random, num: int) -> list[int]:
        return rng.choices(self._ids, k=num)


class RandomWords:
    """Makes prompts of random words, about `num` tokens long."""

    def __init__(self, tokens_per_word: float = 1.0) -> None:
        self._tokens_per_word = tokens_per_word

    def __call__(self, rng: random.Random, num: int) -> str:
        return " ".join(rng.choices(WORDS, k=max(1, round(num / self._tokens_per_word))))


PromptMaker = RandomIds | RandomWords


def join(first: Prompt, second: Prompt) -> Prompt:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first} {second}"
    assert isinstance(first, list) and isinstance(second, list), "one maker makes both"
    return first + second


def random_requests(
    num: int, inputs: Lengths, outputs: Lengths, make_prompt: PromptMaker, rng: random.Random
) -> list[SampleRequest]:
    requests = []
    for _ in range(num):
        num_input, num_output = inputs.sample(rng), outputs.sample(rng)
        requests.append(SampleRequest(make_prompt(rng, num_input), num_input, num_output))
    return requests


def prefix_requests(
    num: int,
    prefix_len: int,
    num_prefixes: int,
    inputs: Lengths,
    outputs: Lengths,
    make_prompt: PromptMaker,
    rng: random.Random,
) -> list[SampleRequest]:
    """Makes `random_requests`, with one of `num_prefixes` prefixes before each prompt, used equally often."""
    prefixes = [make_prompt(rng, prefix_len) for _ in range(num_prefixes)]
    order = [i % num_prefixes for i in range(num)]
    rng.shuffle(order)
    requests = random_requests(num, inputs, outputs, make_prompt, rng)
    return [
        SampleRequest(join(prefixes[i], request.prompt), prefix_len + request.num_input, request.num_output)
        for i, request in zip(order, requests, strict=True)
    ]


def sharegpt_requests(num: int, make_prompt: PromptMaker, rng: random.Random) -> list[SampleRequest]:
    """Requests with ShareGPT's distribution of lengths and random contents."""
    requests: list[SampleRequest] = []
    while len(requests) < num:
        num_input = round(rng.lognormvariate(*SHAREGPT_IN))
        num_output = round(rng.lognormvariate(*SHAREGPT_OUT))
        if is_kept(num_input, num_output):
            requests.append(SampleRequest(make_prompt(rng, num_input), num_input, num_output))
    return requests


def is_kept(num_input: int, num_output: int) -> bool:
    """Whether the filter of vLLM's and SGLang's benchmarks keeps a conversation of these lengths."""
    fits = SHAREGPT_LEAST <= num_input <= SHAREGPT_MOST and num_output >= SHAREGPT_LEAST
    return fits and num_input + num_output <= SHAREGPT_TOTAL


class _Turn(msgspec.Struct):
    value: str = ""


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


def read_sharegpt(
    path: Path, num: int, count: Callable[[str], int], output: Lengths | None, rng: random.Random
) -> list[SampleRequest]:
    """Returns `num` first turns of a ShareGPT file, with the second turn's length as output length, or `output`'s.

    `count` counts a text's tokens. Conversations repeat only when all have been used.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[_Conversation])
    except OSError as e:
        raise ConfigError(f"--dataset-path {path}: {e.strerror}") from e
    except msgspec.DecodeError as e:
        raise ConfigError(f"--dataset-path {path}: not in ShareGPT's format: {e}") from e
    pairs = [(c.conversations[0].value, c.conversations[1].value) for c in found if len(c.conversations) > 1]
    rng.shuffle(pairs)
    requests = _kept(pairs, num, count, output, rng)
    if not requests:
        raise ConfigError(f"--dataset-path {path}: no conversation of {len(found)} has a fitting length")
    return [requests[i % len(requests)] for i in range(num)]


def _kept(
    pairs: Sequence[tuple[str, str]], num: int, count: Callable[[str], int], output: Lengths | None, rng: random.Random
) -> list[SampleRequest]:
    requests: list[SampleRequest] = []
    for prompt, answer in pairs:
        if len(requests) == num:
            break
        num_input, num_answer = count(prompt), count(answer)
        if is_kept(num_input, num_answer):
            requests.append(SampleRequest(prompt, num_input, output.sample(rng) if output else num_answer))
    return requests


def estimate_tokens(text: str) -> int:
    return round(len(text) / CHARS_PER_TOKEN)

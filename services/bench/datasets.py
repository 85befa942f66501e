"""What is asked: prompts and the number of tokens to answer with. Pure but for reading a file."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from blockyard.shared.errors import ConfigError

Prompt = str | list[int]

# Log-normal, clipped: the shape of ShareGPT's first turns after the usual filter (4 to 1024 tokens in, at least 4 out,
# 2048 in all), whose means come out at about 210 tokens in and 200 out.
SHAREGPT_IN = (5.05, 1.5)  # mean and deviation of the logarithm
SHAREGPT_OUT = (4.8, 1.1)
SHAREGPT_LEAST, SHAREGPT_MOST, SHAREGPT_TOTAL = 4, 1024, 2048
CHARS_PER_TOKEN = 4.0  # where no tokenizer can be asked
# Words that are one token for nearly every tokenizer that has seen English.
_WORDS = """
    the of and to in is that for it as was with be by on not he his but at are this have from or had an they which
    one you were her all she there would their we him been has when who will more no if out so said what up its
    about into than them can only other new some could time these two may then do first any my now such like our
    over man
"""
WORDS = tuple(_WORDS.split())


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One request."""

    prompt: Prompt
    num_input: int  # tokens; an estimate where the prompt is text
    num_output: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole numbers, uniform from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


def lengths(text: str, range_ratio: float, where: str) -> Lengths:
    """`512` with a ratio of r is 512·(1-r) to 512·(1+r), as in vLLM; `100:1024` says it outright."""
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
    """Draws prompts as token ids from `low` up to but without `high`."""

    def __init__(self, low: int, high: int) -> None:
        self._ids = range(low, high)

    def __call__(self, rng: random.Random, num: int) -> list[int]:
        return rng.choices(self._ids, k=num)


class RandomWords:
    """Draws prompts as text of about `num` tokens."""

    def __init__(self, tokens_per_word: float = 1.0) -> None:
        self._tokens_per_word = tokens_per_word

    def __call__(self, rng: random.Random, num: int) -> str:
        return " ".join(rng.choices(WORDS, k=max(1, round(num / self._tokens_per_word))))


PromptMaker = RandomIds | RandomWords


def join(first: Prompt, second: Prompt) -> Prompt:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first} {second}"
    assert isinstance(first, list) and isinstance(second, list), "one draw makes both"
    return first + second


def random_requests(
    num: int, inputs: Lengths, outputs: Lengths, draw: PromptMaker, rng: random.Random
) -> list[SampleRequest]:
    asks = []
    for _ in range(num):
        num_input, num_output = inputs.draw(rng), outputs.draw(rng)
        asks.append(SampleRequest(draw(rng, num_input), num_input, num_output))
    return asks


def prefix_requests(
    num: int,
    prefix_len: int,
    num_prefixes: int,
    inputs: Lengths,
    outputs: Lengths,
    draw: PromptMaker,
    rng: random.Random,
) -> list[SampleRequest]:
    """As `random_requests`, each prompt after one of `num_prefixes` prefixes; prefixes are used equally often."""
    prefixes = [draw(rng, prefix_len) for _ in range(num_prefixes)]
    order = [i % num_prefixes for i in range(num)]
    rng.shuffle(order)
    asks = random_requests(num, inputs, outputs, draw, rng)
    return [
        SampleRequest(join(prefixes[i], ask.prompt), prefix_len + ask.num_input, ask.num_output)
        for i, ask in zip(order, asks, strict=True)
    ]


def sharegpt_requests(num: int, draw: PromptMaker, rng: random.Random) -> list[SampleRequest]:
    """Lengths as ShareGPT has them, made-up contents."""
    asks: list[SampleRequest] = []
    while len(asks) < num:
        num_input = round(rng.lognormvariate(*SHAREGPT_IN))
        num_output = round(rng.lognormvariate(*SHAREGPT_OUT))
        if is_kept(num_input, num_output):
            asks.append(SampleRequest(draw(rng, num_input), num_input, num_output))
    return asks


def is_kept(num_input: int, num_output: int) -> bool:
    """The filter that the peers' benchmarks put on ShareGPT."""
    fits = SHAREGPT_LEAST <= num_input <= SHAREGPT_MOST and num_output >= SHAREGPT_LEAST
    return fits and num_input + num_output <= SHAREGPT_TOTAL


class _Turn(msgspec.Struct):
    value: str = ""


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


def read_sharegpt(
    path: Path, num: int, count: Callable[[str], int], output: Lengths | None, rng: random.Random
) -> list[SampleRequest]:
    """`num` first turns of a file in ShareGPT's format, answered as long as the second turn, or as `output` says.

    `count` gives a text's tokens. Conversations are drawn without repeats until all are used, then again.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[_Conversation])
    except OSError as e:
        raise ConfigError(f"--dataset-path {path}: {e.strerror}") from e
    except msgspec.DecodeError as e:
        raise ConfigError(f"--dataset-path {path}: not in ShareGPT's format: {e}") from e
    pairs = [(c.conversations[0].value, c.conversations[1].value) for c in found if len(c.conversations) > 1]
    rng.shuffle(pairs)
    asks = _kept(pairs, num, count, output, rng)
    if not asks:
        raise ConfigError(f"--dataset-path {path}: no conversation of {len(found)} has a fitting length")
    return [asks[i % len(asks)] for i in range(num)]


def _kept(
    pairs: Sequence[tuple[str, str]],
    num: int,
    count: Callable[[str], int],
    output: Lengths | None,
    rng: random.Random,
) -> list[SampleRequest]:
    asks: list[SampleRequest] = []
    for prompt, answer in pairs:
        if len(asks) == num:
            break
        num_input, num_answer = count(prompt), count(answer)
        if is_kept(num_input, num_answer):
            asks.append(SampleRequest(prompt, num_input, output.draw(rng) if output else num_answer))
    return asks


def estimate_tokens(text: str) -> int:
    return round(len(text) / CHARS_PER_TOKEN)

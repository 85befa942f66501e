"""Completions with one and with several choices: plain, `n`, `best_of` and beams, and what a client gets of them."""

from typing import Any

import aiohttp
import msgspec
from rig import OnRead, completion, read_all

Body = dict[str, Any]
Answer = list[list[int]]  # token ids of each choice

KINDS: tuple[Body, ...] = (
    {"n": 4, "temperature": 0.8},
    {},
    {"n": 2, "best_of": 4, "temperature": 0.8, "stream": False},
    {"n": 3, "temperature": 0.8},
    {"n": 2, "best_of": 3, "use_beam_search": True, "stream": False},
)
SHARED = 40  # tokens that prompts of one kind begin with: a prefix is found, but no answer is the same


def bodies(count: int, num_tokens: int) -> list[Body]:
    """The kinds in turn. Prompts are token ids of all lengths, so that most end within a block."""
    made = []
    for i in range(count):
        kind = KINDS[i % len(KINDS)]
        prompt = [300 + (i % len(KINDS) * 37 + j) % 3000 for j in range(SHARED)] + [400 + i, *range(500, 500 + i % 23)]
        made.append(completion(num_tokens + i % 7, **{"prompt": prompt, "seed": i, "stream": True} | kind))
    return made


class _Choice(msgspec.Struct):
    index: int
    token_ids: list[int] = []


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


_decode = msgspec.json.Decoder(_Answer).decode


class RefusedError(Exception):
    """An answer without choices."""


async def ask(session: aiohttp.ClientSession, url: str, body: Body, on_read: OnRead = lambda: None) -> Answer:
    """Raises RefusedError for a status other than 200 and for an error within the stream. on_read: at each read."""
    async with session.post(f"{url}/v1/completions", json=body | {"return_token_ids": True}) as answer:
        text = await read_all(answer, on_read)
    if answer.status != 200 or 'data: {"error"' in text:
        raise RefusedError(f"{answer.status}: {text[-500:]}")
    if not body["stream"]:
        return [choice.token_ids for choice in sorted(_decode(text).choices, key=lambda c: c.index)]
    found: Answer = [[] for _ in range(body.get("n", 1))]
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            for choice in _decode(line[6:]).choices:
                found[choice.index] += choice.token_ids
    return found

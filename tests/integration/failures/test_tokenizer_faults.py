"""Costly grammars and templates of one client, and kills of a tokenizer's processes, delay other clients at most."""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from rig import Server, serve

KEYS = ("costly", "other")
LOOPS = "{% for i in range(300) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"  # up to the limit of 2 s
Body = dict[str, Any]


@pytest.fixture(scope="module")
def ring() -> Iterator[Server]:
    with serve("demo", "--dtype", "float32", "--trust-request-chat-template", "--api-key", *KEYS) as server:
        yield server


def chat(**fields: Any) -> Body:
    return {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0} | fields


def costly_grammar(number: int) -> Body:
    """Takes a worker all of its 2 seconds."""
    source = "root ::= " + " | ".join(f'"{number}{i:x}"' for i in range(24_000))
    return chat(structured_outputs={"grammar": source})


def new_schema(name: str) -> Body:
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
    return chat(structured_outputs={"json": schema})


class Client:
    """Requests with one API key; `statuses` has those that were answered."""

    def __init__(self, session: aiohttp.ClientSession, server: Server, key: str) -> None:
        self._session, self._url = session, f"{server.url}/v1/chat/completions"
        self._headers = {"Authorization": f"Bearer {key}"}
        self.statuses: list[int] = []

    async def ask(self, body: Body) -> int:
        async with self._session.post(self._url, json=body, headers=self._headers) as answer:
            await answer.read()
            self.statuses.append(answer.status)
            return answer.status


async def beside(server: Server, costly: list[Body], others: list[Body]) -> tuple[list[int], int, list[int]]:
    """The answers of `others`, one after another while `costly` wait; how many of these had an answer; and theirs."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session:
        client, other = Client(session, server, KEYS[0]), Client(session, server, KEYS[1])
        waiting = [asyncio.create_task(client.ask(body)) for body in costly]
        await asyncio.sleep(0.5)
        statuses = [await other.ask(body) for body in others]
        num_done = len(client.statuses)
        return statuses, num_done, await asyncio.gather(*waiting)


def test_costly_grammars_hold_up_no_new_schema_of_another_client(ring: Server) -> None:
    new = [new_schema(f"field_{i}") for i in range(6)]
    statuses, num_done, theirs = asyncio.run(beside(ring, [costly_grammar(i) for i in range(7)], new))
    assert statuses == [200] * 6 and num_done <= 3
    assert len(theirs) == 7 and 429 not in theirs  # they wait for each other, with room for more


def test_costly_templates_hold_up_no_chat_of_another_client(ring: Server) -> None:
    costly = [chat(chat_template=f"{LOOPS}{i}") for i in range(6)]
    others = [chat(), chat(chat_template="{{ messages[0].content }}"), chat()]
    statuses, num_done, theirs = asyncio.run(beside(ring, costly, others))
    assert statuses == [200] * 3 and num_done <= 3
    assert set(theirs) <= {200, 400} and len(theirs) == 6


@pytest.mark.parametrize("title", ["text fork server", "text worker", "grammar fork server", "grammar worker"])
def test_kills_of_the_tokenizers_processes_cost_no_answer(ring: Server, title: str) -> None:
    assert answers_beside_kills(ring, title, [0.2, 0.2], [title]) == [200] * 60


def test_kills_of_all_of_the_tokenizers_processes_at_once_cost_no_answer(ring: Server) -> None:
    """Many more times than a job may end its worker, also while the fork servers still load."""
    rng = random.Random(0)
    pauses = [rng.uniform(0.0, 1.0) for _ in range(12)]
    parts = [" fork server", " worker", "tokenizer_pool.text_worker", "tokenizer_pool.grammar_worker"]
    assert answers_beside_kills(ring, "all", pauses, parts) == [200] * 60


def answers_beside_kills(ring: Server, name: str, pauses_s: list[float], titles: list[str]) -> list[int]:
    """Statuses of 60 requests, half of them with a new grammar, while processes with these titles are killed."""
    name = name.replace(" ", "_")

    async def run() -> list[int]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session:
            clients = [Client(session, ring, key) for key in KEYS]
            bodies = [new_schema(f"{name}_{i}") if i % 2 else chat() for i in range(60)]
            asked = [asyncio.create_task(clients[i % 3 == 0].ask(body)) for i, body in enumerate(bodies)]
            for pause_s in pauses_s:
                await asyncio.sleep(pause_s)
                for pid, found in ring.family().items():
                    if any(title in found for title in titles):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
            return list(await asyncio.gather(*asked))

    return asyncio.run(run())

"""An adapter that adds tokens, and brings a tokenizer with them: its answers are those of PEFT and transformers."""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from demo_training.adapter_styles import MODEL
from peft_adapters import save_adapter
from rig import Server, serve
from transformers import AutoModelForCausalLM, AutoTokenizer

VOCAB = 4096  # of the demo model
NOTE, REPLY = VOCAB, VOCAB + 1  # the ids of the added tokens
PROMPT = "<|reply|>def add(a, b):\n"
TEMPLATE = "{% for message in messages %}<|reply|>{{ message.content }}<note>{% endfor %}"
NEW, PENALTY = 8, 1.4


@dataclass(frozen=True)
class Expected:
    """What transformers says of `PROMPT`."""

    prompt_ids: list[int]
    text: str
    ids: list[int]
    chat_tokens: int


def write_adapter(folder: Path) -> Expected:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.add_tokens(["<note>"])
    tokenizer.add_special_tokens({"eos_token": "<|reply|>"})
    tokenizer.chat_template = TEMPLATE
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    base.resize_token_embeddings(VOCAB + 2, mean_resizing=False)
    prompt_ids = tokenizer(PROMPT).input_ids
    adapted = save_adapter(base, folder, saves_embedding=True, target_modules=["o_proj"], lora_alpha=1)
    with torch.no_grad():  # the first generated token is an added one
        hidden = base.model(torch.tensor([prompt_ids])).last_hidden_state[0, -1]
        weight = base.get_input_embeddings().weight
        weight[NOTE] = hidden / hidden.square().sum() * ((weight @ hidden).max() + 0.5)
        adapted.save_pretrained(folder, save_embedding_layers=True)
        adapted.generation_config.eos_token_id = None
        given = torch.tensor([prompt_ids])
        how = {"max_new_tokens": NEW, "do_sample": False, "repetition_penalty": PENALTY, "pad_token_id": 4}
        made = adapted.generate(input_ids=given, attention_mask=torch.ones_like(given), **how)
    tokenizer.save_pretrained(folder)
    ids = made[0, len(prompt_ids) :].tolist()
    assert ids[0] == NOTE and REPLY in prompt_ids and len(set(ids)) > 2
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    chat_tokens = len(tokenizer(chat, add_special_tokens=False).input_ids)
    return Expected(prompt_ids, tokenizer.decode(ids, skip_special_tokens=True), ids, chat_tokens)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    folder = tmp_path_factory.mktemp("adapter")
    return folder, write_adapter(folder)


@pytest.fixture(scope="module")
def ring(expected: tuple[Path, Expected], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--device", "cpu", "--dtype", "float32", "--lora-modules", f"noted={expected[0]}")
    with serve("demo", *flags, "--max-model-len", "256", log=tmp_path_factory.mktemp("log") / "log") as server:
        yield server


def post_all(server: Server, *asked: tuple[str, dict[str, Any]]) -> list[tuple[int, Any]]:
    async def post(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        async with session.post(path, json=body) as answer:
            return answer.status, await answer.json()

    async def all_of_them() -> list[tuple[int, Any]]:
        async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(60)) as session:
            return list(await asyncio.gather(*(post(session, *one) for one in asked)))

    return asyncio.run(all_of_them())


def completion(model: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    defaults = {"model": model, "prompt": PROMPT, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    return "/v1/completions", defaults | {"repetition_penalty": PENALTY} | fields


@pytest.mark.timeout(180)
def test_answers_are_those_of_transformers(ring: Server, expected: tuple[Path, Expected]) -> None:
    """Also beside requests without the adapter, with log-probabilities, and with noise."""
    want = expected[1]
    asked = [
        completion("noted"),
        completion("noted", prompt=want.prompt_ids, logprobs=2, return_token_ids=True),
        completion("noted", temperature=1.0, top_k=1),
        completion("demo"),
        completion("noted", presence_penalty=0.1, logprobs=0, echo=True),
        completion("demo", temperature=0.9, top_p=0.8, seed=3),
    ]
    together = post_all(ring, *asked)
    assert [status for status, _ in together] == [200] * len(asked)
    choices = [answer["choices"][0] for _, answer in together]
    assert choices[0]["text"] == choices[1]["text"] == choices[2]["text"] == want.text
    assert choices[1]["token_ids"] == want.ids and choices[1]["logprobs"]["tokens"][0] == "<note>"
    assert choices[4]["text"].startswith("<|reply|>def")
    assert choices[4]["logprobs"]["tokens"][:2] == ["<|bos|>", "<|reply|>"]
    assert "<note>" not in choices[3]["text"]
    for i in (3, 5):  # a request of the base has the same answer alone
        assert post_all(ring, asked[i])[0][1]["choices"][0]["text"] == choices[i]["text"]


@pytest.mark.timeout(180)
def test_its_tokenizer_template_and_end(ring: Server, expected: tuple[Path, Expected]) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "logit_bias": {str(REPLY): 100}}
    found = post_all(
        ring,
        ("/v1/chat/completions", chat | {"model": "noted"}),
        ("/tokenize", {"model": "noted", "prompt": "<note>", "add_special_tokens": False}),
        ("/tokenize", {"model": "demo", "prompt": "<note>", "add_special_tokens": False}),
        ("/detokenize", {"model": "noted", "tokens": [NOTE, REPLY]}),
        completion("noted", ignore_eos=False, logit_bias={str(REPLY): 100}),
        completion("noted", guided_regex="[ab]{4}", logit_bias={str(NOTE): 100}, ignore_eos=False),
    )
    assert [status for status, _ in found] == [200] * len(found), found
    answers = [answer for _, answer in found]
    assert answers[0]["usage"]["prompt_tokens"] == expected[1].chat_tokens
    assert (answers[0]["choices"][0]["finish_reason"], answers[0]["choices"][0]["message"]["content"]) == ("stop", "")
    assert answers[1]["tokens"] == [NOTE] and len(answers[2]["tokens"]) > 1
    assert answers[3]["prompt"] == "<note><|reply|>"
    assert answers[4]["choices"][0]["finish_reason"] == "stop" and answers[4]["usage"]["completion_tokens"] == 1
    assert re.fullmatch("[ab]{4}", answers[5]["choices"][0]["text"])


@pytest.mark.timeout(180)
def test_others_may_not_name_the_tokens(ring: Server) -> None:
    fields: list[tuple[str, dict[str, Any]]] = [
        ("prompt", {"prompt": [5, NOTE]}),
        ("logit_bias", {"logit_bias": {str(NOTE): 1}}),
        ("allowed_token_ids", {"allowed_token_ids": [5, NOTE]}),
        ("stop_token_ids", {"stop_token_ids": [NOTE]}),
    ]
    found = post_all(ring, *(completion("demo", **one) for _, one in fields))
    assert [(status, answer["error"]["param"]) for status, answer in found] == [(400, name) for name, _ in fields]
    beyond = post_all(ring, completion("noted", prompt=[5, VOCAB + 2]), completion("noted", stop_token_ids=[REPLY]))
    assert [status for status, _ in beyond] == [400, 200] and str(VOCAB + 2) in beyond[0][1]["error"]["message"]
    [(_, only)] = post_all(ring, completion("noted", allowed_token_ids=[NOTE]))
    assert only["choices"][0]["text"] == "<note>" * NEW

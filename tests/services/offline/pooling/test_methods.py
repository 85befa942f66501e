"""The methods of pooling models, with the ring's client faked."""

import asyncio
import concurrent.futures
import gc
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_pooling import CLASSIFY, EMBED, REWARD, SCORE, FakePooling, vector_of
from fake_ring import CARD

from blockyard import PoolingParams, PoolingRequestOutput
from blockyard.services.offline.pooling.methods import PoolingMethods
from blockyard.services.offline.pooling.pooling_batch import PART, PoolingBatch
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import NamedPrompt, PoolingCard, PoolingTask


class FakeLLM(PoolingMethods):
    """Runs each batch on an event loop of its own."""

    def __init__(self, card: PoolingCard | None) -> None:
        self.card = msgspec.structs.replace(CARD, pooling=card)
        self.fake = FakePooling(self.card)
        self.threads = concurrent.futures.ThreadPoolExecutor()
        self.batches: list[PoolingBatch] = []
        self.loops: list[asyncio.AbstractEventLoop] = []  # of the batches
        session = SimpleNamespace(card=self.card, submit_batch=self.submit_batch)
        self._running: Any = SimpleNamespace(session=session)

    def submit_batch(self, make: Callable[[str, Any], PoolingBatch]) -> tuple[PoolingBatch, Any]:
        batch = make("llm1", SimpleNamespace(pooling=self.fake, clock=time.monotonic))
        self.batches.append(batch)
        return batch, self.threads.submit(self.run, batch)

    def run(self, batch: PoolingBatch) -> None:
        with asyncio.Runner() as runner:
            self.loops.append(runner.get_loop())
            runner.run(batch.run())


@pytest.fixture
def make() -> Iterator[Callable[[PoolingCard | None], FakeLLM]]:
    made: list[FakeLLM] = []

    def one(card: PoolingCard | None) -> FakeLLM:
        made.append(FakeLLM(card))
        return made[-1]

    yield one
    for llm in made:
        llm.threads.shutdown()


def test_embed_takes_texts_ids_and_dicts(make) -> None:
    llm = make(EMBED)
    prompts = ["abc", [97, 98, 99], {"prompt": "d"}, {"prompt_token_ids": [100]}]
    outputs = llm.embed(prompts, use_tqdm=False, truncate_prompt_tokens=-1)
    assert [one.outputs.embedding for one in outputs] == [vector_of(t) for t in ("abc", "abc", "d", "d")]
    assert outputs[0].outputs.hidden_size == 4 and outputs[0].prompt_token_ids == [97, 98, 99]
    assert not any(map(gc.is_tracked, [*outputs, *(one.outputs for one in outputs)]))
    assert outputs[2].finished and len({one.request_id for one in outputs}) == 4
    [call] = llm.fake.calls
    assert (call.truncate_prompt_tokens, call.params.task) == (-1, PoolingTask.EMBED)
    assert llm.embed([]) == []


def test_encode_returns_arrays_of_any_shape(make) -> None:
    [output] = make(REWARD).encode("abc", use_tqdm=False)
    assert isinstance(output, PoolingRequestOutput)
    assert output.outputs.data.dtype == np.float32 and output.outputs.data.tolist() == [[0, 1], [1, 1], [2, 1]]
    [output] = make(REWARD).reward("ab", use_tqdm=False)
    assert output.outputs.data.shape == (2, 2)
    llm = make(EMBED)
    [output] = llm.encode("abc", pooling_task="embed", use_tqdm=False)
    assert output.outputs.data.shape == (4,)
    for asked in ({"pooling_task": "token_embed"}, {"pooling_params": PoolingParams(task="token_embed")}):
        llm.encode("abc", use_tqdm=False, **asked)
        assert llm.fake.calls[-1].params.pooling_type == "ALL"


def test_classify(make) -> None:
    llm = make(CLASSIFY)
    first, logits = llm.classify(["a", "b"], pooling_params=[PoolingParams(), PoolingParams(use_activation=False)])
    assert (first.outputs.probs, first.outputs.num_classes) == ([0.25, 0.5, 0.25], 3)
    assert logits.outputs.probs == [-1, 2, -1]
    assert len(llm.fake.calls) == 2  # parameters are of a frame


def test_score_of_pairs_and_of_vectors(make) -> None:
    outputs = make(SCORE).score("a b", ["a", "b a", "c"], use_tqdm=False)
    assert [one.outputs.score for one in outputs] == [0.5, 1, 0]
    llm = make(EMBED)
    [same, other] = llm.score(["text", "text"], ["text", "other"], use_tqdm=False)
    assert same.outputs.score == pytest.approx(1) and other.outputs.score < 0.9999


def test_score_with_an_instruction(make) -> None:
    llm = make(msgspec.structs.replace(SCORE, has_pair_template=True))
    each = [PoolingParams(), PoolingParams(instruction="own")]
    for params, expected in ((None, ["rank"]), (each[1], ["own"]), (each, ["rank", "own"])):
        llm.fake.calls.clear()
        llm.score("a", ["b", "c"], pooling_params=params, instruction="rank", use_tqdm=False)
        assert sorted(call.instruction for call in llm.fake.calls) == sorted(expected)


def test_many_texts_are_asked_in_parts_and_keep_their_places(make) -> None:
    llm, bars = make(EMBED), []

    def bar(**fields: Any) -> Any:
        bars.append(SimpleNamespace(total=fields["total"], n=0, postfix="", close=lambda: None))
        bars[-1].update = lambda n: setattr(bars[-1], "n", bars[-1].n + n)
        return bars[-1]

    texts = [f"text {i}" for i in range(2 * PART + 5)]
    outputs = llm.embed(texts, use_tqdm=bar)
    assert [one.outputs.embedding for one in outputs] == [vector_of(text) for text in texts]
    assert sorted(len(call.inputs) for call in llm.fake.calls) == [5, PART, PART]
    assert (bars[0].total, bars[0].n) == (len(texts), len(texts))
    with pytest.raises(RequestError, match=rf"prompts\[{PART + 1}\] has 65 tokens") as caught:
        llm.embed([*texts[: PART + 1], "x" * 65], use_tqdm=False)
    assert caught.value.field == f"prompts[{PART + 1}]"


def test_a_full_queue_is_asked_again(make) -> None:
    llm = make(EMBED)
    llm.fake.error = RequestError("full", status=429, retry_after_s=0.01)
    waiting = llm.threads.submit(lambda: llm.embed("abc", use_tqdm=False))
    while len(llm.fake.calls) < 3:
        time.sleep(0.005)
    llm.fake.error = None
    assert waiting.result()[0].outputs.embedding == vector_of("abc")
    assert len({call.request_id for call in llm.fake.calls}) == len(llm.fake.calls)


def test_a_batch_is_aborted_with_the_reason(make) -> None:
    llm = make(EMBED)
    error = RequestError("asleep", status=503)
    llm.fake.answers.clear()
    waiting = llm.threads.submit(lambda: llm.embed("abc", use_tqdm=False))
    while not llm.fake.calls:
        time.sleep(0.005)
    llm.loops[0].call_soon_threadsafe(llm.batches[0].abort, error)
    with pytest.raises(RequestError) as caught:
        waiting.result()
    assert caught.value is error and llm.fake.num_dropped == 1


def test_parameters_reach_the_ring(make) -> None:
    llm = make(msgspec.structs.replace(EMBED, prompts=[NamedPrompt("query", "query: ")]))
    params = PoolingParams(dimensions=np.int64(2), normalize=False, truncate_prompt_tokens=7, truncation_side="left")
    [output] = llm.embed("abc", pooling_params=params, prompt_name="query", use_tqdm=False)
    [call] = llm.fake.calls
    assert len(output.outputs.embedding) == 2 and (call.params.dimensions, call.params.normalize) == (2, False)
    assert (call.truncate_prompt_tokens, call.truncation_side, call.prompt_name) == (7, "left", "query")
    make(REWARD).reward("a", pooling_params=PoolingParams(step_tag_id=5, returned_token_ids=[1, 0]), use_tqdm=False)


@pytest.mark.parametrize(
    ("card", "ask", "said"),
    [
        (EMBED, lambda llm: llm.classify("a"), "has the task embed"),
        (CLASSIFY, lambda llm: llm.embed("a"), "has the task classify"),
        (msgspec.structs.replace(CLASSIFY, of_tokens=True), lambda llm: llm.classify("a"), "results of each token"),
        (msgspec.structs.replace(EMBED, of_tokens=True), lambda llm: llm.score("a", "b"), "results of each token"),
        (CLASSIFY, lambda llm: llm.score("a", "b"), "has the task classify"),
        (SCORE, lambda llm: llm.reward("a"), "has the task score"),
        (None, lambda llm: llm.embed("a"), "generates text"),
        (EMBED, lambda llm: llm.encode("a", pooling_task="classify"), "has the task embed"),
        (CLASSIFY, lambda llm: llm.encode("a", pooling_task="token_embed"), "not one of each token"),
        (SCORE, lambda llm: llm.score("a", "b", instruction="rank"), "instruction is for a model with a template"),
        (SCORE, lambda llm: llm.score("a", "b", pooling_params=3, instruction="rank"), "must be PoolingParams"),
        (EMBED, lambda llm: llm.embed(["a", ""]), r"prompts\[1\]` is empty"),
        (EMBED, lambda llm: llm.embed([[1], [5, 300]]), r"prompts\[1\].*300 is outside"),
        (EMBED, lambda llm: llm.embed([[1], [5, 2.5]]), r"prompts\[1\]: not a list of token ids"),
        (EMBED, lambda llm: llm.embed([[1], [-1]]), r"prompts\[1\]: not a list of token ids"),
        (EMBED, lambda llm: llm.embed([[1], []]), r"prompts\[1\]` is empty"),
        (EMBED, lambda llm: llm.embed("a", pooling_params=PoolingParams(dimensions=3)), "trained for: 2"),
        (EMBED, lambda llm: llm.embed(["a"], pooling_params=[]), "0 pooling_params for 1"),
        (EMBED, lambda llm: llm.embed("a", pooling_params=3), "must be PoolingParams"),
        (EMBED, lambda llm: llm.embed("a", prompt_name="q"), "it has none"),
        (EMBED, lambda llm: llm.embed("a", tokenization_kwargs={"padding": True}), "padding"),
        (EMBED, lambda llm: llm.embed("a", lora_request=1), "lora_request"),
        (SCORE, lambda llm: llm.score(["a", "b"], ["c"]), "2 texts and data_2 1"),
        (SCORE, lambda llm: llm.score("a", ["c", 3]), r"data_2\[1\] must be a text"),
        (SCORE, lambda llm: llm.score("a", ["c", "x" * 65]), r"data_2\[1\] has 66 tokens"),
        (SCORE, lambda llm: llm.score("a", []), "data_2` is empty"),
        (EMBED, lambda llm: PoolingParams(dimensions="a"), "dimensions: Expected"),
        (EMBED, lambda llm: PoolingParams(truncation_side="up"), "left or right"),
    ],
)
def test_what_is_refused(make, card: PoolingCard | None, ask: Callable[[Any], object], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        ask(make(card))

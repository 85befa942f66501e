"""`AsyncLLMEngine.encode`: with a mock worker, and with a ring that answers when a test lets it."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fake_pooling import EMBED, REWARD, FakePooling, vector_of
from fake_ring import CARD

from blockyard import AsyncEngineArgs, AsyncLLM, PoolingOutput, PoolingParams, PoolingRequestOutput
from blockyard.services.offline.outputs import RingLost
from blockyard.services.offline.pooling.pooling_batch import PoolingBatch
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import PoolingCard

Outputs = list[PoolingRequestOutput[PoolingOutput]]


class Rig:
    """An engine whose ring is on the event loop of the test."""

    def __init__(self, card: PoolingCard) -> None:
        self.card = msgspec.structs.replace(CARD, pooling=card)
        self.fake = FakePooling(self.card)
        session: Any = SimpleNamespace(card=self.card, submit_batch=self.submit_batch)
        self.engine = AsyncLLM(SimpleNamespace(session=session))  # type: ignore[arg-type]

    def submit_batch(self, make: Callable[[str, Any], PoolingBatch]) -> tuple[PoolingBatch, Any]:
        batch = make("llm1", SimpleNamespace(pooling=self.fake, clock=time.monotonic))
        return batch, asyncio.run_coroutine_threadsafe(batch.run(), asyncio.get_running_loop())

    async def encode(self, name: str, prompt: Any = "abc", params: Any = None, **more: Any) -> Outputs:
        return [one async for one in self.engine.encode(prompt, params or PoolingParams(), name, **more)]

    async def running(self, name: str) -> "asyncio.Task[Outputs]":
        """A request that the ring has, and does not answer."""
        self.fake.answers.clear()
        task = asyncio.create_task(self.encode(name))
        while not self.fake.calls:
            await asyncio.sleep(0)
        return task


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await work

    asyncio.run(bounded())


def test_outputs_and_arguments() -> None:
    async def scene() -> None:
        rig = Rig(EMBED)
        params = PoolingParams(task="embed", dimensions=2, truncate_prompt_tokens=7)
        [output] = await rig.encode("first", {"prompt_token_ids": [97, 98]}, params, priority=-3)
        assert (output.request_id, output.prompt_token_ids, output.finished) == ("first", [97, 98], True)
        assert output.outputs.data.tolist() == vector_of("ab")[:2]
        [call] = rig.fake.calls
        assert (call.priority, call.truncate_prompt_tokens, call.is_single) == (-3, 7, True)
        several = await asyncio.gather(*(rig.encode(f"r{i}", f"text {i}") for i in range(20)))
        assert [one.outputs.data.tolist() for [one] in several] == [vector_of(f"text {i}") for i in range(20)]
        assert await rig.engine.get_supported_tasks() == ("embed",)
        assert len(await rig.encode("first")) == 1, "its name is free again"
        [rewards] = await Rig(REWARD).encode("rewards")
        assert rewards.outputs.data.shape == (3, 2)

    run(scene())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": ["a", "b"]}, "one prompt, got 2"),
        ({"prompt": []}, "one prompt, got 0"),
        ({"prompt": ""}, "empty"),
        ({"prompt": [5, 300]}, "300 is outside"),
        ({"prompt": "x" * 65}, "has 65 tokens"),
        ({"params": PoolingParams(task="classify")}, "has the task embed"),
        ({"params": 3}, "must be PoolingParams"),
        ({"priority": "high"}, "priority"),
        ({"lora_request": 1}, "lora_request"),
        ({"tokenization_kwargs": {"padding": True}}, "padding"),
        ({"name": 5}, "request_id"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], said: str) -> None:
    async def scene() -> None:
        rig = Rig(EMBED)
        with pytest.raises(RequestError, match=said):
            await rig.encode(**{"name": "wrong"} | fields)
        assert len(await rig.encode("wrong")) == 1, "its name is free"

    run(scene())


def test_an_abort_yields_an_empty_output() -> None:
    async def scene() -> None:
        rig = Rig(EMBED)
        task = await rig.running("slow")
        with pytest.raises(RequestError, match="in use"):
            await rig.encode("slow")
        await rig.engine.abort(["unknown", "slow"])
        [output] = await task
        assert (output.request_id, output.finished, output.outputs.data.shape) == ("slow", True, (0,))
        await asyncio.sleep(0.01)
        assert rig.fake.num_dropped == 1
        rig.fake.answers.set()
        assert len(await rig.encode("slow")) == 1, "its name is free again"

    run(scene())


def test_a_task_that_is_cancelled_ends_its_request() -> None:
    async def scene() -> None:
        rig = Rig(EMBED)
        task = await rig.running("left")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.01)
        assert rig.fake.num_dropped == 1
        rig.fake.answers.set()
        assert len(await rig.encode("left")) == 1, "its name is free again"

    run(scene())


def test_with_a_ring() -> None:
    async def scene() -> None:
        arguments = AsyncEngineArgs(
            worker_cls="mock", task="embed", mock_step_ms=2, log_level="warning", enable_log_requests=False
        )
        engine = await asyncio.to_thread(AsyncLLM.from_engine_args, arguments)
        try:
            [output] = [one async for one in engine.encode([5, 6, 7], PoolingParams(normalize=False), "one")]
            assert output.prompt_token_ids == [5, 6, 7]
            assert output.outputs.data[:4].tolist() == [7, 6, 5, 7]  # as the mock worker has it
        finally:
            await asyncio.to_thread(engine.shutdown)
        with pytest.raises(RingLost):
            await anext(engine.encode("text", PoolingParams(), "late"))

    run(scene())

"""`AsyncLLMEngine` with a mock worker: streams, aborts, and tasks that end early."""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from blockyard import (
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from blockyard.services.offline.outputs import RingLost
from blockyard.shared.errors import RequestError

LONG = SamplingParams(max_tokens=3000)


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLMEngine]:
    arguments = AsyncEngineArgs(worker_cls="mock", mock_step_ms=2, log_level="warning", enable_log_requests=False)
    engine = AsyncLLMEngine.from_engine_args(arguments)
    yield engine
    engine.shutdown()
    engine.shutdown()


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(bounded())


async def collect(engine: AsyncLLMEngine, prompt: Any, params: SamplingParams, name: str) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, name)]


async def nothing_runs(engine: AsyncLLMEngine) -> None:
    while engine._session._client.num_open():
        await asyncio.sleep(0.01)
    assert engine._requests == {}


def test_streams_run_side_by_side(engine: AsyncLLMEngine) -> None:
    async def scene() -> None:
        deltas = SamplingParams(max_tokens=30, seed=1, output_kind=RequestOutputKind.DELTA)
        final = SamplingParams(max_tokens=30, seed=1, output_kind=RequestOutputKind.FINAL_ONLY)
        names = [f"r{i}" for i in range(20)]
        streams = await asyncio.gather(*(collect(engine, f"prompt {name}", deltas, name) for name in names))
        assert max(map(len, streams)) > 1, "text that arrives while the loop is busy is in one output"
        for name, outputs in zip(names, streams, strict=True):
            [whole] = await collect(engine, f"prompt {name}", final, name)
            assert outputs[-1].finished and {one.request_id for one in outputs} == {name}
            assert "".join(one.text for o in outputs for one in o.outputs) == whole.outputs[0].text
        await nothing_runs(engine)

    run(scene())


def test_keywords_of_vllms_example(engine: AsyncLLMEngine) -> None:
    async def scene() -> None:
        async for output in engine.generate(request_id="one", prompt="text", sampling_params=SamplingParams()):
            if output.finished:
                break
        assert len(output.outputs[0].token_ids) == 16
        assert (await engine.get_tokenizer()).encode("text") == output.prompt_token_ids
        assert (await engine.get_model_config()).max_model_len == 4096
        await engine.check_health()
        assert await engine.reset_prefix_cache() and engine.is_running and not engine.errored

    run(scene())
    assert AsyncLLM is AsyncLLMEngine


def test_an_abort_ends_the_iterator(engine: AsyncLLMEngine) -> None:
    async def scene() -> None:
        last = None
        async for output in engine.generate("prompt", LONG, "long"):
            if last is None:
                await engine.abort("long")
            last = output
        assert last is not None and last.finished and last.outputs[0].finish_reason == "abort"
        await engine.abort(["long", "unknown"])
        await nothing_runs(engine)

    run(scene())


def test_an_iterator_that_is_left_ends_its_request(engine: AsyncLLMEngine) -> None:
    async def scene() -> None:
        outputs = engine.generate("prompt", LONG, "left")
        await anext(outputs)
        await outputs.aclose()
        await nothing_runs(engine)
        task = asyncio.create_task(collect(engine, "prompt", LONG, "cancelled"))
        while not engine._session._client.num_open():
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await nothing_runs(engine)

    async def leave() -> None:
        await anext(engine.generate("prompt", LONG, "loop ends"))

    run(scene())
    run(leave())  # asyncio.run closes what is left
    run(nothing_runs(engine))
    run(scene())


def test_errors_are_raised_by_the_iterator(engine: AsyncLLMEngine) -> None:
    async def scene() -> None:
        for prompt, params, text in (
            ([5] * 5000, None, "context length"),
            (["a", "b"], None, "one prompt"),
            ("prompt", SamplingParams(stop_token_ids=[99_999_999]), "stop_token_ids"),
        ):
            with pytest.raises(RequestError, match=text):
                await collect(engine, prompt, params, "wrong")
        with pytest.raises(RequestError, match="is not built yet"):
            await engine.collective_rpc("name")
        with pytest.raises(RequestError, match="generates text"):
            await anext(engine.encode("prompt", PoolingParams(), "wrong"))
        await nothing_runs(engine)

    run(scene())


# public names of vLLM 0.26's AsyncLLM that scripts call; some of older versions
NAMES_OF_VLLM = (
    "abort add_lora add_request check_health collective_rpc dead_error do_log_stats encode errored generate "
    "get_model_config get_supported_tasks get_tokenizer get_vllm_config init_weight_transfer_engine is_paused "
    "is_running is_sleeping is_stopped is_tracing_enabled list_loras model_config pause_generation pin_lora "
    "remove_lora reset_encoder_cache reset_mm_cache reset_prefix_cache resume_generation scale_elastic_ep shutdown "
    "sleep start_profile stop_profile update_weights wake_up checkpoint_prepare checkpoint_restore from_engine_args"
)
REFUSED = (
    "add_request checkpoint_prepare checkpoint_restore get_vllm_config init_weight_transfer_engine "
    "pin_lora scale_elastic_ep start_profile stop_profile update_weights"
)


def test_methods_of_vllm_are_there_or_refused_by_name(engine: AsyncLLMEngine, caplog: pytest.LogCaptureFixture) -> None:
    assert [name for name in NAMES_OF_VLLM.split() if not hasattr(AsyncLLMEngine, name)] == []

    async def scene() -> None:
        for name in REFUSED.split():
            with pytest.raises(RequestError, match=f"`{name}` is not built yet"):
                await getattr(engine, name)("an argument", of="any")
        assert not await engine.is_tracing_enabled() and not await engine.is_sleeping()
        assert await engine.get_supported_tasks() == ("generate",)
        await engine.reset_mm_cache()
        await engine.reset_encoder_cache()
        await collect(engine, "prompt", SamplingParams(max_tokens=3), "counted")
        with caplog.at_level("INFO"):
            await engine.do_log_stats()
        assert "vllm:num_requests_running" in caplog.text and "vllm:generation_tokens" in caplog.text

    run(scene())


def test_generation_pauses_and_goes_on(engine: AsyncLLMEngine) -> None:
    async def scene() -> None:
        await engine.pause_generation(mode="keep", clear_cache=False)
        assert await engine.is_paused()
        task = asyncio.create_task(collect(engine, "prompt", SamplingParams(max_tokens=3), "held"))
        await asyncio.sleep(0.3)
        assert not task.done()
        await engine.resume_generation()
        assert (await task)[-1].finished and not await engine.is_paused()
        with pytest.raises(RequestError, match="mode must be one of"):
            await engine.pause_generation(mode="never")

    run(scene())


def test_a_shutdown_fails_open_requests() -> None:
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(worker_cls="mock", log_level="warning"))

    async def scene() -> None:
        outputs = engine.generate("prompt", LONG, "open")
        await anext(outputs)
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(RingLost):
            async for _ in outputs:
                pass
        with pytest.raises(RingLost):
            await engine.check_health()
        assert engine.errored and engine.is_stopped

    run(scene())

"""Background responses with the official client: polled, cancelled, and streamed from any event on."""

import asyncio
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from blockyard.shared.messages import Cancel, QueueCapacity, Refused

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
BODY: dict[str, Any] = {"model": "tiny", "input": "hi", "background": True}


async def polled(c: openai.AsyncOpenAI, response_id: str) -> Response:
    async with asyncio.timeout(10):
        while (found := await c.responses.retrieve(response_id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
    return found


async def test_polling(rig, client) -> None:
    async with rig() as r, client(r) as c:
        r.ring.step_s = 0.02
        made = await c.responses.create(**BODY, max_output_tokens=8)
        assert (made.status, made.background, made.output) == ("queued", True, [])
        Response.model_validate(made.to_dict())
        await r.until(lambda: bool(r.ring.running))
        assert (await c.responses.retrieve(made.id)).status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="has not ended") as caught:
            await c.responses.create(model="tiny", input="so?", previous_response_id=made.id)
        assert caught.value.param == "previous_response_id"
        found = await polled(c, made.id)
        assert (found.status, found.output_text) == ("incomplete", "w0 w1 w2 w3 w4 w5 w6 w7 ")
        assert found.usage is not None and found.usage.output_tokens == 8
        assert (await c.responses.cancel(made.id)).to_dict() == found.to_dict()
        with pytest.raises(openai.BadRequestError) as caught:
            await c.responses.retrieve(made.id, stream=True)
        assert caught.value.param == "stream"


async def test_cancelling(rig, client) -> None:
    async with rig() as r, client(r) as c:
        r.ring.step_s = 0.02
        made = await c.responses.create(**BODY, max_output_tokens=200)
        await r.until(lambda: bool(r.ring.running))
        stopped = await c.responses.cancel(made.id)
        assert stopped.status == "cancelled" and r.ring.frames(Cancel) and r.gateway.num_active == 0
        assert (await c.responses.cancel(made.id)).to_dict() == stopped.to_dict()
        assert (await c.responses.retrieve(made.id)).status == "cancelled"
        early = await c.responses.create(**BODY, max_output_tokens=200)
        assert (await c.responses.cancel(early.id)).status == "cancelled"
        plain = await c.responses.create(model="tiny", input="hi", max_output_tokens=1)
        with pytest.raises(openai.BadRequestError, match="Only a background response"):
            await c.responses.cancel(plain.id)
        deleted = await c.responses.create(**BODY, max_output_tokens=200)
        await c.responses.delete(deleted.id)
        with pytest.raises(openai.NotFoundError):
            await c.responses.retrieve(deleted.id)
        await r.until(lambda: r.gateway.num_active == 0 and not r.ring.running)
        with pytest.raises(openai.NotFoundError):
            await c.responses.retrieve(deleted.id)


async def test_a_stream_goes_on_behind_any_event(rig, client) -> None:
    async with rig() as r, client(r) as c:
        r.ring.step_s = 0.01
        stream = await c.responses.create(**BODY, max_output_tokens=40, stream=True)
        seen: list[Any] = []
        async for event in stream:
            seen.append(event)
            if event.sequence_number == 10:
                break
        await stream.close()
        response_id = seen[0].response.id
        rest = [e async for e in await c.responses.retrieve(response_id, stream=True, starting_after=10)]
        events = seen + rest
        assert [event.sequence_number for event in events] == list(range(len(events)))
        for event in events:
            EVENT.validate_python(event.to_dict())
        assert events[-1].type == "response.incomplete"
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == "".join(f"w{i} " for i in range(40))
        assert events[-1].response.to_dict() == (await c.responses.retrieve(response_id)).to_dict()
        for after in (-1, 0, 17, len(events) - 2, len(events) - 1):
            more = {} if after < 0 else {"starting_after": after}
            again = [e async for e in await c.responses.retrieve(response_id, stream=True, **more)]
            assert [e.to_dict() for e in again] == [e.to_dict() for e in events[after + 1 :]]
        for wrong in (len(events), "x", "-1", 10**20):
            with pytest.raises(openai.BadRequestError) as caught:
                await c.responses.retrieve(response_id, stream=True, starting_after=wrong)
            assert caught.value.param == "starting_after"


async def test_two_clients_read_one_stream(rig, client) -> None:
    async with rig(keepalive_s=0.05) as r, client(r) as c:
        r.ring.step_s = 0.08
        stream = await c.responses.create(**BODY, max_output_tokens=6, stream=True)
        first = await anext(aiter(stream))
        other = await c.responses.retrieve(first.response.id, stream=True)
        both = [[event.sequence_number async for event in each] for each in (stream, other)]
        assert both[0][-1] == both[1][-1] and both[1] == list(range(both[1][-1] + 1))


async def test_a_cancelled_stream_ends(rig, client) -> None:
    async with rig() as r, client(r) as c:
        r.ring.step_s = 0.02
        stream = await c.responses.create(**BODY, max_output_tokens=200, stream=True)
        events = []
        async for event in stream:
            events.append(event)
            if len(events) == 5:
                await c.responses.cancel(events[0].response.id)
        assert events[-1].response.status == "cancelled"
        EVENT.validate_python(events[-1].to_dict())
        assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_failures_are_in_the_response(rig, client) -> None:
    async with rig() as r, client(r) as c:
        made = await c.responses.create(**BODY | {"input": "a" * 300})  # more than the context
        failed = await polled(c, made.id)
        assert failed.status == "failed" and failed.error is not None and failed.error.code == "context_length_exceeded"
        stream = await c.responses.create(**BODY | {"input": "a" * 300}, stream=True)
        assert [event.type async for event in stream][-1] == "response.failed"
        with pytest.raises(openai.BadRequestError, match="failed") as caught:
            await c.responses.create(model="tiny", input="so?", previous_response_id=made.id)
        assert caught.value.param == "previous_response_id"
        r.ring.fail_at = 3
        made = await c.responses.create(**BODY)
        assert (await polled(c, made.id)).status == "failed"


async def test_running_responses_are_bounded_and_never_dropped(rig, client) -> None:
    async with rig(max_stored_responses=2) as r, client(r) as c:
        r.ring.step_s = 0.02
        made = [await c.responses.create(**BODY, max_output_tokens=200) for _ in range(2)]
        with pytest.raises(openai.RateLimitError):
            await c.responses.create(**BODY)
        plain = await c.responses.create(model="tiny", input="hi", max_output_tokens=1)
        with pytest.raises(openai.NotFoundError):  # there is no room for it
            await c.responses.retrieve(plain.id)
        for one in made:
            assert (await c.responses.retrieve(one.id)).status in ("queued", "in_progress")
            assert (await c.responses.cancel(one.id)).status == "cancelled"


async def test_a_model_that_was_unloaded_while_the_response_was_queued(rig, client) -> None:
    gone = "The model `sql` does not exist any more: the adapter was unloaded."
    async with rig() as r, client(r) as c:
        r.ring.refuse = lambda frame: Refused(frame.request_id, frame.attempt, 404, "model", gone, QueueCapacity(9, 9))
        found = await polled(c, (await c.responses.create(**BODY)).id)
        assert found.status == "failed" and found.error is not None
        assert (found.error.code, found.error.message) == ("model_not_found", gone)
        with pytest.raises(openai.NotFoundError) as caught:
            await c.responses.create(model="tiny", input="hi")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")

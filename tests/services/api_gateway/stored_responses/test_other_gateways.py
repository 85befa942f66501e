"""A response is read, continued, cancelled, streamed and deleted through a gateway that does not keep it."""

import asyncio
from typing import Any

import msgspec
import openai
import pytest

from blockyard.services.api_gateway.stored_responses import stored_responses
from blockyard.shared.messages import Frame, GatewayIn, ResponseQuery

BODY: dict[str, Any] = {"model": "tiny", "input": "hi"}
FRAME = msgspec.msgpack.Decoder(GatewayIn)


def link(one: Any, other: Any) -> None:
    """Frames of one gateway to the other arrive there, as bytes of the wire."""
    to_other, deliver = other.ring.me.incarnation, other.gateway.handle
    one.ring.members[to_other] = other.ring.me

    def sent(plain: Any) -> Any:
        def send(to: int, frame: Frame) -> bool:
            if to != to_other:
                return bool(plain(to, frame))
            plain_frame = FRAME.decode(msgspec.msgpack.encode(frame))
            asyncio.get_running_loop().call_soon(deliver, one.ring.me.incarnation, plain_frame)
            return True

        return send

    one.ring.send, one.ring.answer = sent(one.ring.send), sent(one.ring.answer)


async def test_every_use_through_another_gateway(rig, client) -> None:
    async with rig() as a, rig() as b, client(a) as owner, client(b) as other:
        b.ring.me = msgspec.structs.replace(b.ring.me, incarnation=98)
        link(a, b)
        link(b, a)
        a.ring.step_s = 0.02
        made = await owner.responses.create(**BODY, max_output_tokens=3)
        assert (await other.responses.retrieve(made.id)).to_dict() == made.to_dict()
        more = await other.responses.create(**BODY, previous_response_id=made.id, max_output_tokens=1)
        assert len((await owner.responses.input_items.list(more.id)).data) == 3

        stream = await owner.responses.create(**BODY, background=True, stream=True, max_output_tokens=20)
        first = await anext(aiter(stream))
        elsewhere = await other.responses.retrieve(first.response.id, stream=True, starting_after=0)
        numbers = [event.sequence_number async for event in elsewhere]
        assert numbers == [event.sequence_number async for event in stream] and numbers[0] == 1
        with pytest.raises(openai.BadRequestError) as caught:
            await other.responses.retrieve(first.response.id, stream=True, starting_after=1000)
        assert caught.value.param == "starting_after"

        slow = await owner.responses.create(**BODY, background=True, max_output_tokens=200)
        assert (await other.responses.cancel(slow.id)).status == "cancelled"
        await other.responses.delete(made.id)
        for c in (owner, other):
            with pytest.raises(openai.NotFoundError, match="There is no response"):
                await c.responses.retrieve(made.id)


async def test_a_gateway_that_is_gone_or_silent(rig, client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "REPLY_S", 0.2)
    async with rig() as r, client(r) as c:
        known = msgspec.structs.replace(r.ring.me, incarnation=98)
        response_id = f"resp_s{98:016x}{'0' * 24}"
        with pytest.raises(openai.NotFoundError, match="--response-store") as caught:
            await c.responses.retrieve(response_id)
        assert caught.value.code == "response_lost"
        r.ring.join(known)
        with pytest.raises(openai.InternalServerError, match="does not answer"):
            await c.responses.retrieve(response_id)
        asking = asyncio.create_task(c.responses.create(**BODY, previous_response_id=response_id))
        await r.until(lambda: len(r.ring.frames(ResponseQuery)) == 2)
        r.ring.lose(98)
        with pytest.raises(openai.NotFoundError, match="lost") as caught:
            await asking
        assert (caught.value.param, caught.value.code) == ("previous_response_id", "response_lost")

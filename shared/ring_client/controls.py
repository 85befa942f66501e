"""Operators' commands: sends each to every scheduler and waits for all answers."""

import asyncio
import secrets

import msgspec

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Control, Controlled, Member, Role
from blockyard.shared.ring_client.ring_links import RingLinks


class ControlClient:
    def __init__(self, links: RingLinks) -> None:
        self._links = links
        self._waiting: dict[tuple[int, str], asyncio.Future[Controlled]] = {}  # by scheduler and request

    async def ask(self, control: Control) -> list[Controlled]:
        """Returns every scheduler's answer. Raises RequestError without a scheduler, or if one refuses or is lost."""
        control = msgspec.structs.replace(control, request_id=secrets.token_hex(8))
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Controlled]] = []
        for scheduler in self._links.of(Role.SCHEDULER):
            future: asyncio.Future[Controlled] = loop.create_future()
            self._waiting[scheduler.incarnation, control.request_id] = future
            futures.append(future)
            if not self._links.send(scheduler.incarnation, control):
                future.set_exception(_lost())
        try:
            answers = await asyncio.gather(*futures)
        finally:
            self._waiting = {key: f for key, f in self._waiting.items() if key[1] != control.request_id}
        if not answers:
            raise RequestError("No scheduler is ready.", status=503, retry_after_s=1.0)
        for answer in answers:
            if answer.status >= 400:
                retry_after_s = 1.0 if answer.status == 429 else None
                raise RequestError(answer.message, answer.field, answer.status, retry_after_s=retry_after_s)
        return answers

    def answered(self, peer: int, frame: Controlled) -> None:
        future = self._waiting.get((peer, frame.request_id))
        if future is not None and not future.done():
            future.set_result(frame)

    def gone(self, member: Member) -> None:
        for (scheduler, _), future in self._waiting.items():
            if scheduler == member.incarnation and not future.done():
                future.set_exception(_lost())


def _lost() -> RequestError:
    return RequestError("The scheduler was lost before it answered.", status=503, retry_after_s=1.0)

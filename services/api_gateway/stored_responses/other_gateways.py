"""Queries to the gateway that keeps a response, by frames on the links."""

import asyncio
import secrets

from blockyard.services.api_gateway.stored_responses.response_store import FIELD, lost
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Member, ResponseQuery, ResponseReply, ResponseVerb, Role
from blockyard.shared.ring_client.ring_links import RingLinks


class OtherGateways:
    def __init__(self, links: RingLinks) -> None:
        self._links = links
        self._waiting: dict[str, tuple[int, asyncio.Future[ResponseReply]]] = {}  # by request id, with the peer

    def is_member(self, gateway: int) -> bool:
        """Whether it is another gateway that lives."""
        member = self._links.members.get(gateway)
        is_own = gateway == self._links.me.incarnation
        return member is not None and member.role is Role.API_GATEWAY and not is_own

    async def ask(
        self, gateway: int, response_id: str, tenant: str, verb: ResponseVerb, timeout_s: float, after: int = -1
    ) -> ResponseReply:
        """Raises RequestError: the error of that gateway, a 404 if it is gone, a 503 if it does not answer."""
        query = ResponseQuery(secrets.token_hex(8), response_id, tenant, verb, after)
        reply: asyncio.Future[ResponseReply] = asyncio.get_running_loop().create_future()
        if not self.is_member(gateway) or not self._links.send(gateway, query):
            raise lost(response_id)
        self._waiting[query.request_id] = gateway, reply
        try:
            async with asyncio.timeout(timeout_s):
                found = await reply
        except TimeoutError as e:
            said = f"The gateway that keeps the response {response_id[:200]!r} does not answer."
            raise RequestError(said, FIELD, status=503, retry_after_s=1.0) from e
        finally:
            del self._waiting[query.request_id]
        if found.status != 200:
            raise RequestError(found.message, found.field, found.status, found.code or None)
        return found

    def replied(self, frame: ResponseReply) -> None:
        """Called for every reply, also a late one."""
        _, reply = self._waiting.get(frame.request_id, (0, None))
        if reply is not None and not reply.done():
            reply.set_result(frame)

    def gone(self, member: Member) -> None:
        """The queries to this member get no reply."""
        for gateway, reply in self._waiting.values():
            if gateway == member.incarnation and not reply.done():
                said = "The response was lost with the gateway process that kept it."
                reply.set_result(ResponseReply("", status=404, message=said, field=FIELD, code="response_lost"))

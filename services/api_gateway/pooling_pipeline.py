"""Sends a checked request to a pooling model into the ring, and waits for all of its results."""

import asyncio
import logging
import secrets
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import msgspec

from blockyard.services.api_gateway.apis.pooling.interface import PoolingApi
from blockyard.services.api_gateway.requests.pooling.pooling_request import PoolingRequest
from blockyard.services.api_gateway.responses.http_generation import OpenRequests
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.errors import RequestError
from blockyard.shared.ring_client.client import RingClient
from blockyard.shared.ring_client.pooling.calls import PooledAnswer, PoolingCall, PoolingInput
from blockyard.shared.ring_client.pooling.pair_scores import score_pairs
from blockyard.shared.ring_client.schedulers import not_ready

log = logging.getLogger(__name__)


class PoolingPipeline:
    def __init__(self, client: RingClient, open_requests: OpenRequests, config: GatewayConfig) -> None:
        """`open_requests` counts them with requests for generation."""
        self._client, self._open_requests, self._config = client, open_requests, config
        self._running: dict[asyncio.Task[Any], str] = {}  # to the id of its answer
        self._errors: dict[asyncio.Task[Any], RequestError] = {}  # of ended requests

    async def answer(self, api: PoolingApi, request: PoolingRequest, tenant: str) -> bytes:
        """Returns the body of the answer. Cancelling it drops the request in the ring. Raises RequestError."""
        model = request.card.names[0]
        with self._open_requests.counted(1) if not request.batch_line else nullcontext():
            if not request.batch_line:
                self._open_requests.check_tokens()
            self._client.schedulers.check_capacity(model, self._client.clock(), tenant, request.user)
            if request.batch_line and not self._client.schedulers.of(model):
                raise not_ready(f"the model `{model}`")  # it is repeated, and so not held
            pooled = await self._run(request, tenant)
        if self._config.log_requests:
            text = "%s: %d results of %d tokens for %s"
            log.info(text, request.options.answer_id, len(pooled.items), pooled.num_tokens, model)
        if self._config.enable_prompt_tokens_details:
            options = msgspec.structs.replace(request.options, prompt_tokens_details=True)
            request = msgspec.structs.replace(request, options=options)
        return api.answer(request, pooled)

    def abort(self, answer_ids: set[str], error: RequestError) -> int:
        """Ends the open requests with these answer ids. Returns how many."""
        return self._end([task for task, answer_id in self._running.items() if answer_id in answer_ids], error)

    def abandon(self, error: RequestError) -> None:
        """Fails every open request, before the process ends."""
        self._end(list(self._running), error)

    def _end(self, tasks: list["asyncio.Task[Any]"], error: RequestError) -> int:
        for task in tasks:
            self._errors[task] = error
            task.cancel()
        return len(tasks)

    async def _run(self, request: PoolingRequest, tenant: str) -> PooledAnswer:
        """Runs in the caller's task, which `abort` and `abandon` cancel."""
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = request.options.answer_id
        try:
            return await self._pool(request, tenant)
        except asyncio.CancelledError:
            if (error := self._errors.get(task)) is not None:
                task.uncancel()
                raise error from None
            raise
        finally:
            del self._running[task]
            self._errors.pop(task, None)

    async def _pool(self, request: PoolingRequest, tenant: str) -> PooledAnswer:
        name = secrets.token_hex(10)
        if request.pairs is not None:
            call = self._call(request, [], name, tenant)
            return await score_pairs(self._client.pooling, call, request.pairs.pairs(), request.pairs.compares)
        if request.messages is None:
            return await self._client.pooling.pool(self._call(request, request.inputs(), name, tenant))
        pooling, cuts = request.card.pooling, request.truncate_prompt_tokens is not None
        # cut as a text, it keeps its special tokens, if the template does not write it once more
        as_text = cuts and request.add_special_tokens is True and pooling is not None and not pooling.writes_messages
        prompt = msgspec.structs.replace(request.messages, want_text=as_text)
        [rendered] = await self._client.tokenizer_client.tokenize([prompt], f"{name}-messages", tenant=tenant)
        given = rendered.text if as_text else rendered.token_ids
        return await self._client.pooling.pool(self._call(request, [given], name, tenant))

    def _call(self, request: PoolingRequest, inputs: Sequence[PoolingInput], name: str, tenant: str) -> PoolingCall:
        call = request.call(inputs, name, tenant)
        return call if request.batch_line else replace(call, check_room=self._open_requests.check_tokens)

"""The official client of a rig."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import openai
import pytest


@asynccontextmanager
async def _client(r: Any, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{r.url}/v1", api_key=key, max_retries=0) as made:
        yield made


@pytest.fixture
def client() -> Callable[..., AbstractAsyncContextManager[openai.AsyncOpenAI]]:
    """`async with client(rig)`, or `client(rig, key)`."""
    return _client

"""The gateway of a pooling model, with the ring client's pooling faked."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec
import pytest
from fake_pooling import FakePooling
from fake_ring import CARD

from blockyard.shared.messages import PoolingCard


@pytest.fixture
def pooling_rig(rig: Any) -> Callable[..., AbstractAsyncContextManager[tuple[Any, FakePooling]]]:
    """`async with pooling_rig(card, **as of rig) as (r, fake)`. card: None: of a model that generates."""

    @asynccontextmanager
    async def made(card: PoolingCard | None, **fields: Any) -> AsyncIterator[tuple[Any, FakePooling]]:
        async with rig(pooling=card, **fields) as r:
            fake = FakePooling(msgspec.structs.replace(CARD, pooling=card))
            r.gateway.client.pooling = fake
            yield r, fake

    return made

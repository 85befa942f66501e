"""kill -9 of a service amid 2,000 texts: none is missing, none is answered twice, and all vectors are as before."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from pooling_ring import PoolingRing, pooling_ring
from sentence_folders import WORDS, save_sentence_folder
from sentence_transformers.sentence_transformer.modules import Pooling

from blockyard.shared.messages import FinishReason
from blockyard.shared.ring_client.client import RingClient
from blockyard.shared.ring_client.pooling.calls import PooledAnswer

Vectors = npt.NDArray[np.float32]
NUM_TEXTS, OF_A_CALL, AT_ONCE = 2000, 100, 3
# many steps are left when the process is killed
SMALL_STEPS = ("--max-num-batched-tokens", "256", "--max-num-seqs", "32")
RNG = np.random.default_rng(5)
TEXTS = [" ".join(RNG.choice(WORDS, n)) for n in RNG.integers(1, 60, NUM_TEXTS)]


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolingRing]:
    folder = tmp_path_factory.mktemp("models") / "m"
    save_sentence_folder(folder, Pooling(32, "mean"))
    with pooling_ring(folder, *SMALL_STEPS, log=folder.parent / "log") as ring:
        yield ring


async def all_texts(ring: PoolingRing, client: RingClient) -> Vectors:
    """Asks for all texts in calls of some, of which a few are open at a time: so each service has work all the time."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(first: int) -> PooledAnswer:
        async with turns:
            return await client.pooling.pool(ring.call(TEXTS[first : first + OF_A_CALL]))

    answers = await asyncio.gather(*map(one, range(0, NUM_TEXTS, OF_A_CALL)))
    return np.stack([item.data for answer in answers for item in answer.items])


async def killed(ring: PoolingRing, client: RingClient, title: str) -> Vectors:
    before = client.meters.ended[FinishReason.STOP]
    running = asyncio.ensure_future(all_texts(ring, client))
    while client.meters.ended[FinishReason.STOP] < before + NUM_TEXTS // 5:
        await asyncio.sleep(0.001)
    ring.kill(title)
    assert not running.done()
    found = await running
    assert client.meters.ended[FinishReason.STOP] == before + NUM_TEXTS, "a text was answered twice, or never"
    assert not client.num_open()
    return found


@pytest.fixture(scope="module")
def undisturbed(ring: PoolingRing) -> Vectors:
    return ring.run(lambda client: all_texts(ring, client))


@pytest.mark.parametrize("title", ["scheduler", "gpu_worker", "tokenizer_pool 0", "message_bus", "detokenizer 0"])
def test_kill_amid_texts(ring: PoolingRing, undisturbed: Vectors, title: str) -> None:
    found = ring.run(lambda client: killed(ring, client, title))
    assert np.abs(found - undisturbed).max() <= 1e-5


def test_batch_invariant_vectors_are_equal(tmp_path: Path) -> None:
    """Behind a kill, texts are in other steps, beside others."""
    save_sentence_folder(tmp_path / "m", Pooling(32, "mean"))
    with pooling_ring(tmp_path / "m", *SMALL_STEPS, "--batch-invariant", log=tmp_path / "log") as ring:
        before = ring.run(lambda client: all_texts(ring, client))
        found = ring.run(lambda client: killed(ring, client, "gpu_worker"))
    assert np.array_equal(found, before)

"""Prefill and decode workers under the real scheduler: the same tokens as one worker, and no block is left."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from core_loop import CoreLoop
from equality import Request, noisy, requests
from kv_peers import needs_nixl
from proxied import Proxy
from role_loop import RoleLoop
from ties import Ties
from tiny_models import BY_NAME, greedy_score, settings, start

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.mock import runner as mock_runner
from blockyard.services.gpu_worker.mock.batch import PlanError
from blockyard.services.gpu_worker.transfers.mock_memory import MockMemory
from blockyard.services.kv_transfer.routes import decode_places, encode_places
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.worker import KVTransferConfig, KVTransferFaults, MockConfig, WorkerConfig
from blockyard.shared.messages import FinishReason, KVRole, Sampling

PREFILL, DECODE = KVRole.PREFILL, KVRole.DECODE
CONNECTORS = ["shm", "tcp", pytest.param("nixl", marks=needs_nixl)]


@pytest.fixture
def make_loop(tmp_path: Path) -> Iterator[Callable[..., RoleLoop]]:
    made: list[RoleLoop] = []

    def one(**settings: Any) -> RoleLoop:
        made.append(RoleLoop(tmp_path, **settings))
        return made[-1]

    yield one
    for loop in made:
        loop.close()


def add_mock(loop: RoleLoop, role: KVRole, connector: str = "shm", num_blocks: int = 400, **more: Any) -> int:
    config = WorkerConfig(
        process=ProcessConfig(name="worker", bus=BusConfig(registry="ipc:///unused", bind="ipc:///unused")),
        model_path="/nowhere",
        worker_cls="mock",
        block_size=4,
        max_num_batched_tokens=64,
        mock=MockConfig(num_blocks=num_blocks, max_model_len=400),
        kv_transfer=KVTransferConfig(role=role, connector=connector, **more),
    )
    return loop.add_worker(config, lambda config: mock_runner.start(config, lambda *_: None, make_memory=MockMemory))


def ask(loop: RoleLoop, count: int, first: int = 0, shared: int = 8) -> None:
    """Prompts of 9 to 120 tokens, some with a prefix of others."""
    for i in range(first, first + count):
        rng = np.random.default_rng(i)
        prompt = [
            *np.random.default_rng(i // 4).integers(1000, 3000, shared),
            *rng.integers(1000, 3000, 1 + i * 37 % 112),
        ]
        loop.add(
            f"r{i}", [int(token) for token in prompt], Sampling(max_tokens=1 + i % 12, seed=i), 1 + 2 * (i % 5 == 4)
        )


def check_clean(loop: RoleLoop) -> None:
    """No block is in use, held or quarantined at the end, on either side."""
    stats = loop.core.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    assert loop.core.ledger.transfers == {} and not loop.core.handovers.num_inbound.total()
    for worker in loop.workers:
        assert loop.transfers[worker].open_transfers() == {}


@pytest.mark.parametrize("connector", CONNECTORS)
def test_mock_workers_read_only_their_own_tokens(make_loop: Callable[..., RoleLoop], connector: str) -> None:
    """The mock workers check each block that a sequence reads against its tokens."""
    loop = make_loop(decode_prefill_tokens=8)
    for role in (PREFILL, PREFILL, DECODE, DECODE):
        add_mock(loop, role, connector)
    ask(loop, 40)
    loop.run()
    one = make_loop()
    add_mock(one, KVRole.BOTH)
    ask(one, 40)
    one.run()
    assert loop.outputs == one.outputs and loop.finishes == one.finishes and not loop.details
    assert set(loop.finishes.values()) == {FinishReason.LENGTH}
    assert loop.ledger.num_landed >= 20 and loop.ledger.num_failed_blocks == 0
    assert one.ledger.num_landed == 0
    check_clean(loop)
    ask(loop, 40)  # prefixes are cached now, and fewer blocks are sent
    loop.outputs.clear()
    loop.finishes.clear()
    loop.num_asked //= 2
    loop.run()
    assert loop.outputs == one.outputs
    check_clean(loop)


def test_a_mock_worker_finds_a_wrong_block(make_loop: Callable[..., RoleLoop]) -> None:
    """Without this the other tests would show nothing."""
    loop = make_loop(decode_prefill_tokens=8)
    source, _ = add_mock(loop, PREFILL), add_mock(loop, DECODE)
    memory = loop.runners[source].kv_memory
    send = memory.begin_send

    def send_other(transfer: int, blocks: list[int]) -> None:
        send(transfer, blocks)
        assert memory.layout is not None
        rows = memory.arena.bytes.view(-1, memory.layout.block_bytes)
        rows[blocks[0]] = rows[blocks[-1]]

    memory.begin_send = send_other  # type: ignore[method-assign]
    loop.add("r", list(range(1000, 1060)), Sampling(max_tokens=4))
    with pytest.raises(PlanError, match="KV that is not its own"):
        loop.run()


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_a_worker_that_dies_costs_no_token(make_loop: Callable[..., RoleLoop], victim: int) -> None:
    loop = make_loop(decode_prefill_tokens=8)
    workers = [add_mock(loop, role) for role in (PREFILL, PREFILL, DECODE, DECODE)]
    ask(loop, 30)
    while loop.ledger.num_landed < 3 or not loop.transfers[workers[victim]].num_open:
        loop.turn()
    loop.lose(workers[victim])
    loop.run()
    one = make_loop()
    add_mock(one, KVRole.BOTH)
    ask(one, 30)
    one.run()
    assert loop.outputs == one.outputs and not loop.details
    check_clean(loop)


@pytest.fixture
def proxy_to() -> Iterator[Callable[[str], Proxy]]:
    proxies: list[Proxy] = []
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def one(endpoint: str) -> Proxy:
        proxies.append(Proxy(loop, endpoint))
        return proxies[-1]

    yield one
    for proxy in proxies:
        proxy.close()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.parametrize("loses_frames", [False, True])
@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_link_that_breaks_between_living_workers_costs_no_token(
    make_loop: Callable[..., RoleLoop], proxy_to: Callable[[str], Proxy], connector: str, loses_frames: bool
) -> None:
    """Both abort the transfer, without another transfer between them and without a lease that is over."""
    loop = make_loop(kv_lease_s=1e6)
    loop.bus = BusConfig(registry="ipc:///unused", bind="tcp://127.0.0.1")
    slow = KVTransferFaults(delay_ms=20.0)
    source = add_mock(loop, PREFILL, connector, encrypt=False, faults=slow)
    target = add_mock(loop, DECODE, connector, encrypt=False)
    geometry = loop.core.groups[target].geometry
    [place] = decode_places(geometry.kv_endpoint)
    proxy = proxy_to(place.endpoint)
    endpoint = encode_places([msgspec.structs.replace(place, endpoint=proxy.endpoint)])
    loop.core.groups[target].geometry = msgspec.structs.replace(geometry, kv_endpoint=endpoint)
    prompt = [int(token) for token in np.random.default_rng(0).integers(1000, 3000, 300)]
    sampling = Sampling(max_tokens=10, seed=0)
    loop.add("r", prompt, sampling)
    transfers = loop.ledger.transfers
    while not any(one.landed for one in transfers.values()):
        loop.turn()
    if loses_frames:  # the sender writes the rest, and the receiver does not hear of it
        proxy.swallow()
        while loop.transfers[source].num_open:
            loop.turn()
    assert [0 < len(one.landed) < len(one.target.blocks) for one in transfers.values()] == [True]
    proxy.cut()
    loop.run()
    one = make_loop()
    add_mock(one, KVRole.BOTH)
    one.add("r", prompt, sampling)
    one.run()
    assert loop.outputs == one.outputs and not loop.details
    assert (loop.ledger.num_landed, loop.ledger.num_aborted) == (0, 1)
    check_clean(loop)


@pytest.fixture(scope="module", params=["llama", "deepseek-v3"])
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, list[Request], dict[tuple[str, int], list[int]]]:
    """A checkpoint, its judge, requests, and the outputs of one worker."""
    folder = tmp_path_factory.mktemp("tiny")
    score = greedy_score(BY_NAME[request.param].save(folder))
    asked = requests(12, max_tokens=12)
    loop = CoreLoop(start(folder, max_model_len=256))
    for one in asked:
        loop.add(one.name, one.prompt, one.sampling, one.n)
    loop.run()
    return folder, score, asked, loop.outputs


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_model_continues_on_blocks_of_another_worker(
    make_loop: Callable[..., RoleLoop], tiny: Any, connector: str
) -> None:
    folder, score, asked, expected = tiny
    loop, ties = make_loop(decode_prefill_tokens=8, chunk=16), Ties()
    for role, blocks in ((PREFILL, 400), (DECODE, 300)):
        transfer = KVTransferConfig(role=role, connector=connector)
        config = settings(folder, max_model_len=256, num_gpu_blocks_override=blocks, kv_transfer=transfer)
        loop.add_worker(config, lambda config: engine.start(config, lambda *_: None))
    for request in asked:
        loop.add(request.name, request.prompt, request.sampling, request.n)
    loop.run()
    assert loop.ledger.num_landed >= 8 and loop.ledger.num_failed_blocks == 0
    for request in asked:
        for choice in range(request.n):
            place = (request.name, choice)
            judge = noisy(score, request.sampling, choice)
            ties.compare(f"{connector}: {place}", request.prompt, expected[place], loop.outputs[place], judge)
    ties.check()
    check_clean(loop)


@pytest.mark.parametrize("connector", CONNECTORS)
def test_lost_late_and_damaged_copies_cost_no_token(make_loop: Callable[..., RoleLoop], connector: str) -> None:
    """With checksums a flipped bit never reaches a sequence, and no block is left in quarantine.

    A link whose copies fail is avoided for a while, so a run may end with few copies: new workers run then.
    """
    faults = KVTransferFaults(drop=0.1, delay_ms=4.0, flip=0.1)
    num_failed_blocks = num_aborted = num_landed = num_runs = 0
    while not (num_failed_blocks and num_aborted and num_landed > 10):
        assert num_runs < 12, (num_failed_blocks, num_aborted, num_landed)
        loop = make_loop(decode_prefill_tokens=8)
        for role in (PREFILL, PREFILL, DECODE, DECODE):
            add_mock(loop, role, connector, faults=faults)
        ask(loop, 60)
        loop.run()
        one = make_loop()
        add_mock(one, KVRole.BOTH)
        ask(one, 60)
        one.run()
        assert loop.outputs == one.outputs and loop.finishes == one.finishes and not loop.details
        check_clean(loop)
        num_failed_blocks += loop.ledger.num_failed_blocks
        num_aborted += loop.ledger.num_aborted
        num_landed += loop.ledger.num_landed
        num_runs += 1


def test_without_checksums_a_flipped_bit_reaches_a_sequence(make_loop: Callable[..., RoleLoop]) -> None:
    """The test above would fail without checksums."""
    loop = make_loop(decode_prefill_tokens=8)
    for role in (PREFILL, DECODE):
        add_mock(loop, role, checksums=False, faults=KVTransferFaults(flip=1.0))
    ask(loop, 60)
    with pytest.raises(PlanError, match="KV that is not its own"):
        loop.run()

"""Prefill and decode groups of unlike shape, with follower processes: the same tokens as one worker with one rank."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from core_loop import CoreLoop
from equality import noisy, requests
from role_loop import RoleLoop
from ties import Ties
from tiny_models import BY_NAME, greedy_score, settings, start

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.interfaces import OffloadableRunner
from blockyard.services.gpu_worker.ranks.leader_team import LeaderTeam
from blockyard.shared.config.services.worker import KVTransferConfig, WorkerConfig
from blockyard.shared.errors import BlockyardError
from blockyard.shared.messages import KVRole

BLOCKS = {KVRole.PREFILL: 400, KVRole.DECODE: 300}


class Roles:
    """Workers of both roles, with their followers."""

    def __init__(self, folder: Path, **loop: Any) -> None:
        self.loop, self._folder = RoleLoop(folder, **loop), folder
        self.teams: dict[int, LeaderTeam] = {}
        self.errors: list[BlockyardError] = []

    def add(self, model: Path, role: KVRole, size: int, connector: str, num_stages: int = 1) -> int:
        config = settings(
            model,
            max_model_len=256,
            num_gpu_blocks_override=BLOCKS[role],
            tensor_parallel_size=size,
            pipeline_parallel_size=num_stages,
            kv_transfer=KVTransferConfig(role=role, connector=connector),
        )
        config = self._with_bus(config)
        if size == num_stages == 1:
            return self.loop.add_worker(config, lambda config: engine.start(config, lambda *_: None))
        team = LeaderTeam(config, self._folder, self.errors.append)
        team.start({})

        def begin(config: WorkerConfig) -> OffloadableRunner:
            runner = engine.start(config, lambda *_: None, team=team)
            team.serve()
            return runner

        worker = self.loop.add_worker(config, begin, team)
        self.teams[worker] = team
        return worker

    def close(self) -> None:
        self.loop.close()
        for team in self.teams.values():
            team.close()

    def _with_bus(self, config: WorkerConfig) -> WorkerConfig:
        process = type(config.process)(name=config.process.name, bus=self.loop.bus)
        return type(config)(**{name: getattr(config, name) for name in config.__struct_fields__} | {"process": process})


@pytest.fixture
def make_roles(tmp_path: Path) -> Iterator[Callable[..., Roles]]:
    made: list[Roles] = []

    def one(**loop: Any) -> Roles:
        made.append(Roles(tmp_path, **loop))
        return made[-1]

    yield one
    for roles in made:
        roles.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any, Any, Any]]:
    """By name: a checkpoint, its judge, requests, and the outputs of one worker."""
    known: dict[str, tuple[Path, Any, Any, Any]] = {}

    def one(name: str) -> tuple[Path, Any, Any, Any]:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            score = greedy_score(BY_NAME[name].save(folder))
            asked, loop = requests(12, max_tokens=12), CoreLoop(start(folder, max_model_len=256))
            for request in asked:
                loop.add(request.name, request.prompt, request.sampling, request.n)
            loop.run()
            known[name] = (folder, score, asked, loop.outputs)
        return known[name]

    return one


@pytest.mark.parametrize(
    ("name", "prefill", "decode", "connector"),
    [
        ("llama", (2, 1), (1, 1), "shm"),
        ("llama", (1, 1), (2, 1), "tcp"),
        ("llama", (2, 1), (3, 1), "shm"),
        ("deepseek-v3", (2, 1), (1, 1), "tcp"),
        ("llama", (1, 2), (1, 1), "tcp"),
        ("deepseek-v3", (1, 1), (1, 2), "shm"),
        ("gemma4-moe", (1, 3), (1, 2), "shm"),
        ("llama", (2, 1), (2, 2), "tcp"),
    ],
)
def test_groups_of_unlike_shape_give_the_tokens_of_one_rank(
    make_roles: Callable[..., Roles],
    models: Any,
    name: str,
    prefill: tuple[int, int],
    decode: tuple[int, int],
    connector: str,
) -> None:
    """Ranks of a stage, and stages. With three ranks and two K/V heads, two ranks have the same head; latent rows are
    on all ranks."""
    model, score, asked, expected = models(name)
    roles, ties = make_roles(decode_prefill_tokens=8, chunk=16), Ties()
    source = roles.add(model, KVRole.PREFILL, prefill[0], connector, prefill[1])
    target = roles.add(model, KVRole.DECODE, decode[0], connector, decode[1])
    loop = roles.loop
    for request in asked:
        loop.add(request.name, request.prompt, request.sampling, request.n)
    loop.run()
    assert loop.ledger.num_landed >= 8 and loop.ledger.num_failed_blocks == loop.ledger.num_aborted == 0
    for request in asked:
        for choice in range(request.n):
            place, judge = (request.name, choice), noisy(score, request.sampling, choice)
            ties.compare(f"{connector}: {place}", request.prompt, expected[place], loop.outputs[place], judge)
    ties.check()
    stats = loop.core.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0) and loop.ledger.transfers == {}
    assert [loop.transfers[worker].open_transfers() for worker in (source, target)] == [{}, {}]
    assert not roles.errors

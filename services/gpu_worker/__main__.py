"""`python -m blockyard.services.gpu_worker SETTINGS`: runs one worker, with a model or as a mock."""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.services.gpu_worker.child_processes.start import ADAPTER_READER, start_child
from blockyard.services.gpu_worker.compilation.compile_processes import CompileProcesses, is_new, num_processes
from blockyard.services.gpu_worker.interfaces import KVTransfers, OffloadableRunner, Report, WorkerLinks
from blockyard.services.gpu_worker.loading.sleep import SleepingRunner
from blockyard.services.gpu_worker.mock import runner as mock_runner
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.ranks import network
from blockyard.services.gpu_worker.ranks.distant_replicas import DistantReplicas, meet_distant
from blockyard.services.gpu_worker.ranks.leader_team import ENVIRONMENT, LeaderTeam
from blockyard.services.gpu_worker.ranks.ray_group.ray_ranks import RayRanks, place_ranks, wait_for_ray
from blockyard.services.gpu_worker.ranks.replica_meeting import NAME, meet
from blockyard.services.gpu_worker.ranks.replica_team import ReplicaTeam
from blockyard.services.gpu_worker.ranks.several_hosts import RankHost, wait_for_hosts
from blockyard.services.gpu_worker.service import Worker
from blockyard.services.gpu_worker.startup.start_report import process_age_s
from blockyard.shared.bus.links import Links
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import BlockyardError, ConfigError, DeviceError, RankLostError
from blockyard.shared.messages import Role, WorkerIn
from blockyard.shared.process import settings
from blockyard.shared.process.cores import usable_cores
from blockyard.shared.process.liveness import LivenessPipe

if TYPE_CHECKING:
    from blockyard.services.gpu_worker.transfers.mock_memory import MockMemory
    from blockyard.services.gpu_worker.transfers.worker_transfers import WorkerTransfers

# Two caches of what oneDNN compiles for each number of rows: its own (256 KiB an entry), and that of ideep, through
# which torch calls it. Both keep 1,024 entries unless limited, and memory freed between them is not reused.
CACHED_PRODUCTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "64"}
RANKS_END_S = 5.0
BROKEN_SENT_S = 1.0
STOPPED_S = 0.3  # in which this process is asked to end, too, if another replica was
GPU = Path("/dev/nvidiactl")  # exists if the machine has a GPU

Replicas = ReplicaTeam | DistantReplicas
Start = Callable[[WorkerConfig, Report, CompileProcesses | None], OffloadableRunner]


def serve(config: WorkerConfig) -> None:
    if config.node_rank:
        serve_ranks(config)
        return
    if config.gpu is not None and config.num_ranks == 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = own_gpu(os.environ.get("CUDA_VISIBLE_DEVICES"), config.gpu)
    if config.kernel_cache is not None:
        os.environ["TRITON_CACHE_DIR"] = str(Path(config.kernel_cache).absolute() / "triton")
    for name, most in CACHED_PRODUCTS.items():
        os.environ.setdefault(name, most)
    team = start_ranks(config)
    processes = start_compilers(config)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    model = config.served_model_names[0] if config.served_model_names else config.model_path
    links: Links[WorkerIn] = Links(
        config.process.name,
        Role.GPU_WORKER,
        config.process.bus,
        WorkerIn,
        model=model,
        own_heartbeat=True,
        liveness=LivenessPipe(config.process.liveness_fd),
    )
    with links, ExitStack() as ending:
        links.update(kv_role=config.kv_transfer.role if config.kv_transfer is not None else None)

        def report(phase: str, progress: float, notes: list[str]) -> None:
            links.update(phase=phase, progress=progress, notes=list(notes))

        replicas = wait_for_others(config, team, links, stopped, ending)
        try:
            start, held_bytes = load_engine(config, team, replicas)
            runner = SleepingRunner(lambda: start(config, report, processes), lambda: held_bytes(config), freeze)
            transfers = make_transfers(config, links, runner, team)
        except BlockyardError as e:
            fail_start(team, e)
            raise
        teams = [one for one in (replicas, team) if one is not None]
        for one in teams:
            one.serve()
        links.update(ready=True)
        freeze()
        gc.disable()  # a collection would delay a step
        try:
            Worker(links, runner, transfers, team).run(stopped)
        except RankLostError:
            if not stopped.wait(RANKS_END_S):  # the team ends this process and says which rank was the first to end
                raise
        for one in teams:
            one.close()


def fail_start(team: LeaderTeam | None, error: BlockyardError) -> None:
    """Tells other ranks why the start fails. For one that is lost, the team ends this process and says why it ended."""
    if isinstance(error, RankLostError):
        time.sleep(RANKS_END_S)
    if team is not None:
        team.fail(error)


def wait_for_others(
    config: WorkerConfig,
    team: LeaderTeam | None,
    links: Links[WorkerIn],
    stopped: threading.Event,
    ending: ExitStack,
) -> Replicas | None:
    """Waits for the workers that have the experts of the model together with this one, and for the ranks of this one
    that its process does not start. Returns the former; None: this one has all experts. ending: of this process."""
    by_ray = None
    if config.ray is not None:
        links.update(phase="waiting for room for ranks that Ray starts")
        by_ray = place_ranks(config, config.ray, ending)
    replicas = meet_replicas(config, by_ray, links, stopped)
    if team is None:
        return replicas
    if replicas is not None:
        team.replica_folder, team.replica_store = str(replicas.folder), replicas.store
    if config.num_nodes > 1:
        links.update(phase="waiting for ranks of other hosts")
        wait_for_hosts(config, team, lambda address: links.update(ranks=address), stopped.is_set)
    elif by_ray is not None:
        links.update(phase="waiting for ranks that Ray starts")
        is_one_host = len(set(by_ray.addresses)) == 1 and (replicas is None or not replicas.store)
        wait_for_ray(config, by_ray, team, stopped.is_set, is_one_host=is_one_host)
    return replicas


def meet_replicas(
    config: WorkerConfig, by_ray: RayRanks | None, links: Links[WorkerIn], stopped: threading.Event
) -> Replicas | None:
    """See `wait_for_others`. by_ray: ranks of this worker; None: Ray starts none. Raises LoadError."""
    if config.expert_replicas == 1:
        return None
    links.update(phase="waiting for other replicas")

    def turn() -> None:
        if stopped.is_set():
            raise SystemExit(0)

    def end(error: BlockyardError) -> None:
        if not stopped.wait(STOPPED_S):
            end_with(config, error)

    replica = Shard(config.replica, config.expert_replicas)
    if config.replicas_apart:
        folder = Path(sys.argv[1]).absolute().parent
        distant = meet_distant(config, folder, lambda address: links.update(ranks=address), turn, end)
        links.watch(*distant.sources)
        return distant
    hosts = () if by_ray is None else by_ray.addresses
    name = f"{NAME}{config.replica_group}"
    met = meet(Path(sys.argv[1]).absolute().parent, replica, config.rank_timeout_s, turn, hosts, name)
    replicas = ReplicaTeam(replica, met, end)
    links.watch(*replicas.sources)
    return replicas


def start_ranks(config: WorkerConfig, gpu: Path = GPU) -> LeaderTeam | None:
    """Starts the other ranks of this worker: they import torch while this process does. None: there are none.

    Raises ConfigError if there are fewer GPUs.
    """
    if config.worker_cls == "mock" or (config.num_ranks == 1 and config.expert_replicas == 1):
        return None
    if config.num_ranks == 1:
        os.environ.update(environment_of_all(config))
        return None

    def end(error: BlockyardError) -> None:
        if isinstance(error, DeviceError):
            time.sleep(BROKEN_SENT_S)  # the worker's loop tells the scheduler, and ends
        end_with(config, error)

    own, all_ranks = environments_of_ranks(config, gpu), environment_of_all(config)
    team = LeaderTeam(config, Path(sys.argv[1]).absolute().parent, end, all_ranks)
    team.start(own)
    os.environ.update({**all_ranks, **own.get(0, {})})
    return team


def serve_ranks(config: WorkerConfig) -> None:
    """Runs the ranks of a host that has no leader, until one ends. Raises ConfigError."""
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    host = RankHost(config, Path(sys.argv[1]).absolute().parent, partial(end_with, config))
    try:
        host.start(environment_of_all(config), environments_of_ranks(config))
        host.run(stopped, LivenessPipe(config.process.liveness_fd))
    finally:
        host.close()


def end_with(config: WorkerConfig, error: BlockyardError) -> None:
    settings.report_error(config.process, error)
    settings.end(error.exit_code)


def environment_of_all(config: WorkerConfig) -> dict[str, str]:
    """Returns variables of all ranks of this host. Raises ConfigError for an interface that is not there."""
    on_gpus = (
        config.device != "cpu"
        and (config.num_nodes > 1 or config.replicas_apart)
        and config.process.bus.bind.startswith("tcp://")
    )
    return ENVIRONMENT | (network.environment(config.process.bus) if on_gpus else {})


def environments_of_ranks(config: WorkerConfig, gpu: Path = GPU) -> dict[int, dict[str, str]]:
    """Returns variables of each rank of this host. Raises ConfigError if there are fewer GPUs."""
    if config.device == "cpu" or not gpu.exists():
        return {}
    visible, first, ranks = os.environ.get("CUDA_VISIBLE_DEVICES"), config.gpu or 0, config.host_ranks
    num = len(list(gpu.parent.glob("nvidia[0-9]*"))) if visible is None else len(visible.split(","))
    if first + len(ranks) > num:
        raise ConfigError(f"{config.describe_ranks()}: each rank needs its own GPU, and there are {num} here")
    return {rank: {"CUDA_VISIBLE_DEVICES": own_gpu(visible, first + i)} for i, rank in enumerate(ranks)}


def load_engine(
    config: WorkerConfig, team: LeaderTeam | None = None, replicas: Replicas | None = None
) -> tuple[Start, Callable[[WorkerConfig], int]]:
    """Returns two functions: one makes the runner, one counts the bytes of device memory that this process holds."""
    if config.worker_cls == "mock":
        make_memory = load_transfers()[1] if config.kv_transfer is not None else None
        return partial(mock_runner.start, make_memory=make_memory), mock_runner.held_bytes
    has_adapters = config.lora is not None or config.prompts is not None
    reader = start_child(ADAPTER_READER) if has_adapters else None  # it imports torch meanwhile, too
    with settings.loading_modules():
        # imports torch, which takes seconds and which a mock worker does not need
        from blockyard.services.gpu_worker import engine  # noqa: PLC0415

    make_reader, before_s = engine.readers(reader), [process_age_s()]

    def start(config: WorkerConfig, report: Report, processes: CompileProcesses | None) -> OffloadableRunner:
        first_s = before_s.pop() if before_s else 0.0  # later starts are after deep sleep
        return engine.start(config, report, processes, team, make_reader, replicas, first_s)

    return start, engine.held_bytes


def start_compilers(config: WorkerConfig, gpu: Path = GPU) -> CompileProcesses | None:
    """Starts compile processes if the kernel cache is empty: they import Triton while this process imports torch."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    if config.worker_cls == "mock" or config.device == "cpu" or not gpu.exists() or not is_new(folder):
        return None
    processes = CompileProcesses(num_processes(usable_cores(), config.replicas * len(config.host_ranks)))
    processes.start()
    return processes


def make_transfers(
    config: WorkerConfig, links: WorkerLinks, runner: SleepingRunner, team: LeaderTeam | None = None
) -> KVTransfers | None:
    """Binds the socket for KV blocks of other workers. Raises ConfigError if that cannot be done."""
    if config.kv_transfer is None:
        return None
    worker_transfers, _ = load_transfers()
    return worker_transfers(config, links, lambda: runner.kv_memory, team)


def load_transfers() -> "tuple[type[WorkerTransfers], type[MockMemory]]":
    """Returns the class of transfers, and that of the blocks of a mock worker with transfers."""
    # they import torch, which a mock worker without transfers does not need
    from blockyard.services.gpu_worker.transfers import mock_memory, worker_transfers  # noqa: PLC0415

    return worker_transfers.WorkerTransfers, mock_memory.MockMemory


def freeze() -> None:
    """Excludes all current objects from garbage collection, because they live as long as the worker."""
    gc.collect()
    gc.freeze()


def own_gpu(visible: str | None, place: int) -> str:
    """Returns the CUDA name of a GPU from its index among the visible GPUs."""
    return str(place) if visible is None else visible.split(",")[place].strip()


if __name__ == "__main__":
    settings.end(settings.run(WorkerConfig, serve))

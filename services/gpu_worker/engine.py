"""Builds a ready runner from the settings: device, weights, memory. Imports torch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from blockyard.services.gpu_worker.child_processes.start import Child
from blockyard.services.gpu_worker.compilation.compile_processes import CompileProcesses
from blockyard.services.gpu_worker.cores import default_threads
from blockyard.services.gpu_worker.encoders.encoder_engine import EncoderStart, follow_encoder, start_encoder
from blockyard.services.gpu_worker.encoders.encoder_ranks import EncoderFollower
from blockyard.services.gpu_worker.encoders.encoder_runner import EncoderRunner
from blockyard.services.gpu_worker.execution.pooled_steps import PooledSteps
from blockyard.services.gpu_worker.execution.ranks.expert_balancer import ExpertBalancer
from blockyard.services.gpu_worker.execution.ranks.expert_moves import (
    MovableExperts,
    agree_on_numbers,
    describe_spread,
    movable_experts,
)
from blockyard.services.gpu_worker.execution.ranks.follower import Follower, FollowerNeeds
from blockyard.services.gpu_worker.execution.ranks.leader import LeaderModel, LeaderPool, LeaderStore
from blockyard.services.gpu_worker.interfaces import Report
from blockyard.services.gpu_worker.kv import scales as kv_scales
from blockyard.services.gpu_worker.kv.pool import KVPool, LargestOfRanks, block_bytes
from blockyard.services.gpu_worker.layers.cpu_offload import HostWeights, describe_experts
from blockyard.services.gpu_worker.loading import checkpoint, checkpoint_check, page_cache
from blockyard.services.gpu_worker.loading.classifier_tokens import settle_classifier
from blockyard.services.gpu_worker.loading.hf_config import read_config
from blockyard.services.gpu_worker.loading.weights import HostShare, WeightTable
from blockyard.services.gpu_worker.lora.module_tensors import last_name
from blockyard.services.gpu_worker.lora.ranks.leader_adapters import LeaderAdapters
from blockyard.services.gpu_worker.lora.reader_client import AdapterReader, ReaderProcess
from blockyard.services.gpu_worker.lora.targets import ModelTargets
from blockyard.services.gpu_worker.lora.worker_adapters import WorkerAdapters
from blockyard.services.gpu_worker.memory import MemoryPlan, free_host_bytes, plan_host
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.models.registry import Build, find_family, is_of_transformers
from blockyard.services.gpu_worker.parallel.loading_slots import loading_slot
from blockyard.services.gpu_worker.parallel.rank_group import RankGroup
from blockyard.services.gpu_worker.parallel.replicas import ExpertExchange, ReplicaPeers, StepAgreement
from blockyard.services.gpu_worker.parallel.shares import WHOLE
from blockyard.services.gpu_worker.parallel.stages import Stage
from blockyard.services.gpu_worker.parallel.team import RankGroups, RankTeam, SendCommand, naming_leader
from blockyard.services.gpu_worker.pooling.output import PoolingOutput
from blockyard.services.gpu_worker.pooling.selection import choose_output, modules_folder
from blockyard.services.gpu_worker.prompt_adapters.adapter_hosts import (
    MakeReader,
    adapter_limits,
    add_long_rotations,
    make_hosts,
    start_reader,
)
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.startup.backend import Backend, pick_backend
from blockyard.services.gpu_worker.startup.geometry import card_of, eos_ids_of, geometry_of, need_of
from blockyard.services.gpu_worker.startup.model_tables import declare, make_table, replica_of, with_headers
from blockyard.services.gpu_worker.startup.rank_connection import connect_ranks, connect_replicas, free_of_all
from blockyard.services.gpu_worker.startup.stage_choice import choose_stage, describe_stage, make_stage_model
from blockyard.services.gpu_worker.startup.start_report import StartReport, Throttle
from blockyard.services.gpu_worker.structured_output.matcher_processes import MatcherProcesses
from blockyard.services.gpu_worker.warm_up import first_step
from blockyard.services.kv_transfer.host.host_store import BlockStore
from blockyard.shared.config.pooling.output_kinds import OutputKind, first_kind, sees_both_sides
from blockyard.shared.config.services.lora import LoraConfig
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.context_length import too_long
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import Geometry
from blockyard.shared.quantization.reading import KEY

DTYPES = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready for steps, with its memory."""

    model: Model
    pool: KVPool
    store: BlockStore | None  # host memory for KV blocks
    geometry: Geometry
    config: WorkerConfig  # settled for this model
    ranks: RankGroups | None  # None: one rank
    adapters: WorkerAdapters | None  # LoRA adapters; None: it serves none
    reader: AdapterReader | None  # of adapters of both kinds; None: it serves neither
    experts: MovableExperts | None  # None: experts stay where they are


def start(
    config: WorkerConfig,
    report_start: Report,
    processes: CompileProcesses | None = None,
    team: RankTeam | None = None,
    make_reader: MakeReader | None = None,
    replicas: StepAgreement | None = None,
    before_s: float = 0.0,
) -> Runner | EncoderRunner:
    """Loads the model and returns its runner. Raises ConfigError or LoadError with a message of one line.

    processes: compile processes that are already started, if any. team: of this leader; None: there is one rank.
    make_reader: of adapters; None: one that starts a process. replicas: that have the experts together with this one;
    None: this one has all. before_s: that this process took until now, for the report.
    """
    report = StartReport(report_start, before_s)
    backend = pick_backend(config.device)
    config = of_host(config)
    threads = config.threads or default_threads(config.replicas)
    report.note(backend.set_up(threads, processes, sharers=config.replicas))
    report.phase("reading the configuration")
    settings = read_settings(config, report)
    dtype = pick_dtype(config.dtype, settings.get("dtype") or settings.get("torch_dtype"), backend)
    family = find_family(settings, config.model_impl)
    build = with_headers(family, Path(config.model_path), config) if settings.get(KEY) else family
    shape = build(settings, WeightTable(dtype, torch.device("meta"))).shape
    if shape.has_kv and sees_both_sides(settings):
        name = settings["architectures"][0]
        raise ConfigError(f"config.json: tokens attend to later ones, too, which is not built for {name}")
    if not shape.has_kv:
        length = pick_length(config.max_model_len, shape.max_positions)
        return start_encoder(EncoderStart(config, settings, build, dtype, length, backend, report, team))
    generates = config.task == "generate" and first_kind(settings) is OutputKind.TOKENS
    by = ", by its class in transformers" if is_of_transformers(family) else ""
    report.note(f"model: {settings['architectures'][0]}, {str(dtype).removeprefix('torch.')}{by}")
    loaded = load(config, settings, build, dtype, backend, report, team, make_reader, replicas, generates=generates)
    return make_runner(loaded, settings, backend, report, team, replicas, generates=generates)


def open_device(config: WorkerConfig) -> None:
    """Imports what the device of a follower needs and opens it, while the leader checks its settings. Raises
    ConfigError."""
    pick_backend(config.device).free_bytes(config)


def follow(config: WorkerConfig, team: RankTeam, replicas: ReplicaPeers | None = None) -> Follower | EncoderFollower:
    """Loads the share of a rank that is not the leader. Raises ConfigError or LoadError."""
    backend, report = pick_backend(config.device), StartReport(lambda phase, done, notes: None)
    config = msgspec.structs.replace(of_host(config), prompts=None)  # the leader sends the vectors of each step
    threads = config.threads or default_threads(config.replicas)
    backend.set_up(threads, None, sharers=config.replicas, follows=True)
    settings = read_settings(config, report)
    dtype = pick_dtype(config.dtype, settings.get("dtype") or settings.get("torch_dtype"), backend)
    family = find_family(settings, config.model_impl)
    build = with_headers(family, Path(config.model_path), config) if settings.get(KEY) else family
    shape = build(settings, WeightTable(dtype, torch.device("meta"))).shape
    if not shape.has_kv:
        length = pick_length(config.max_model_len, shape.max_positions)
        return follow_encoder(EncoderStart(config, settings, build, dtype, length, backend, report, team))
    loaded = load(config, settings, build, dtype, backend, report, team, replicas=replicas)
    assert loaded.ranks is not None
    needs = FollowerNeeds(loaded.model, loaded.pool, loaded.ranks, loaded.geometry)
    steps = backend.follower_steps(needs, loaded.config)
    return Follower(loaded.model, loaded.pool, loaded.store, steps, loaded.adapters, loaded.experts)


def readers(first: Child | None) -> MakeReader:
    """Returns what makes readers of adapters. first: the process of the first one, if it is already started."""
    started = [] if first is None else [first]
    return lambda limits, prompts: ReaderProcess(limits, started.pop() if started else None, prompts)


def of_host(config: WorkerConfig) -> WorkerConfig:
    """Returns the settings of a rank: ranks share cores and memory of the machine as workers do."""
    num = len(config.host_ranks) if config.ray is None else config.num_ranks  # Ray may put all of them here
    return msgspec.structs.replace(config, replicas=config.replicas * num)


def read_settings(config: WorkerConfig, report: StartReport) -> dict[str, Any]:
    folder = Path(config.model_path)
    settings = read_config(Path(config.config_path or folder), config.config_overrides, report.note)
    return settle_classifier(settings, modules_folder(config), Path(config.tokenizer_path or folder))


def load(
    config: WorkerConfig,
    settings: dict[str, Any],
    build: Build,
    dtype: torch.dtype,
    backend: Backend,
    report: StartReport,
    team: RankTeam | None,
    make_reader: MakeReader | None = None,
    replicas: ReplicaPeers | None = None,
    *,
    generates: bool = True,
) -> LoadedModel:
    """Loads this rank's weights and reserves KV memory. All ranks have as many blocks as the one with the fewest."""
    folder, shard = Path(config.model_path), WHOLE if team is None else team.place.shard
    kv_dtype = kv_scales.pick_kv_dtype(config.kv_cache_dtype, dtype, backend.has_8_bit_kv)
    whole, stage = declare(build, settings, dtype, config, shard), None
    exchange, config = connect_replicas(config, replicas, team, backend, report)
    if team is not None:
        stage = choose_stage(whole, team, config, free_of_all(config, backend, exchange), kv_dtype)
    with naming_leader(team):
        share = check(build, settings, whole, config, backend, stage)
    ranks, config = connect_ranks(config, team, backend, report, replicas, exchange)
    groups = [*([] if ranks is None else [ranks.everyone]), *([] if exchange is None else [exchange.group])]
    table = make_table(config, dtype, backend, share, shard, ranks, exchange)
    if stage is not None:
        table.stage, table.whole = stage, whole.table
    model = build(settings, table)
    if stage is not None and ranks is not None:
        model = make_stage_model(model, stage, ranks)
        report.note(describe_stage(stage))
    report.note(*describe_spread(config, model, ranks, exchange))
    scales = kv_scales.place_scales(model.table, model.shape.num_layers, kv_scales.are_in_checkpoint(config))
    max_model_len = pick_length(config.max_model_len, model.shape.max_positions)
    reader = start_reader(config, model, max_model_len, make_reader or readers(None))
    # before inference mode, in which classes of transformers cannot be traced
    undivided = None if team is None or config.lora is None else declare(build, settings, dtype, config, WHOLE)
    progress = Throttle(lambda done: report.phase("loading weights", done))
    with torch.inference_mode(), page_cache.read_ahead(config, 0 if team is None else team.place.rank):
        with loading_slot(None if team is None else team.folder.parent, config.max_parallel_loading):
            loaded = checkpoint.load(
                model.table, folder, config.load_format, config.ignore_patterns, config.seed, progress
            )
        report.note(str(loaded), *model.table.describe_unused())
        kv_block_bytes = block_bytes(model.shape, config.block_size, kv_dtype)
        with report.waiting():  # outside of the slot, which others need to come here
            agree_on_numbers(model.experts(), table.ranks, None if exchange is None else exchange.group)
            config = with_fewest_seqs(backend.fit_num_seqs(config, kv_block_bytes), groups)
        longest = add_long_rotations(model, config.lora, max_model_len)
        prepare(model, config, longest, backend, report)
        if table.ranks is not None:
            backend.pick_sums(model, table.ranks, config, report)
        adapters = make_adapters(model, undivided, config.lora, backend, report, reader)
        eos_ids = eos_ids_of(folder, settings, model.shape.vocab_size)
        need = need_of(model, config, longest, kv_block_bytes)
        if generates:
            with alone(ranks, exchange):
                backend.compile_kernels(model, need, kv_dtype, len(eos_ids), config, report)
        else:  # no step samples
            backend.end_compiling()
            config = msgspec.structs.replace(config, run_ahead_penalties=False)
        wait_for_kernels(groups, report)
        report.phase("planning memory")
        host_plan = plan_host(need, free_host_bytes() // config.replicas, config.swap_space_gib)
        with alone(ranks, exchange), naming_leader(team):
            plan = backend.plan_memory(
                *(model, need, kv_dtype, config, backend.moving_bytes(host_plan, config.kv_transfer)),
                generates=generates,
            )
        report.note(*plan.notes, *host_plan.notes)
        for group in groups:
            plan, host_plan = (with_least(one, group, report) for one in (plan, host_plan))
        report.phase("reserving KV memory")
        pool = KVPool(model.shape, plan.num_blocks, config.block_size, kv_dtype, backend.device, config.batch_invariant)
        of_stages = None if stage is None or ranks is None else ranks.everyone.largest
        report.note(*kv_scales.set_pool_scales(pool, scales, config, of_stages, largest_of(table.ranks)))
        store = backend.make_store(host_plan, pool)
    geometry = geometry_of(model, eos_ids, config, need, plan.num_blocks, host_plan.num_blocks)
    experts = movable_experts(config, model, ranks, exchange)
    return LoadedModel(model, pool, store, geometry, config, ranks, adapters, reader, experts)


@contextmanager
def alone(ranks: RankGroups | None, exchange: ExpertExchange | None) -> Iterator[None]:
    """Trial steps of each rank by itself."""
    of_replicas = nullcontext() if exchange is None else exchange.group.alone()
    with of_replicas, nullcontext() if ranks is None else ranks.alone():
        yield


def wait_for_kernels(groups: Sequence[RankGroup], report: StartReport) -> None:
    """Waits until other ranks have compiled theirs, which this one may launch, too."""
    with report.waiting():
        for group in groups:
            group.least(0)


def with_fewest_seqs(config: WorkerConfig, groups: Sequence[RankGroup]) -> WorkerConfig:
    """Returns settings with the number of sequences that all ranks of the groups have room for."""
    for group in groups:
        config = msgspec.structs.replace(config, max_num_seqs=group.least(config.max_num_seqs))
    return config


def with_least(plan: MemoryPlan, ranks: RankGroup, report: StartReport) -> MemoryPlan:
    """Returns a plan with the number of blocks that all ranks have room for."""
    with report.waiting():
        least = ranks.least(plan.num_blocks)
    if least < plan.num_blocks:
        report.note(f"KV blocks: {least}, because another rank has room for no more")
    return MemoryPlan(least, plan.notes)


def make_runner(
    loaded: LoadedModel,
    settings: dict[str, Any],
    backend: Backend,
    report: StartReport,
    team: RankTeam | None,
    replicas: StepAgreement | None,
    *,
    generates: bool,
) -> Runner:
    """Makes what runs plans on a loaded model, and runs first steps. team: of this leader; None: there is one rank.

    replicas: see `start`.
    """
    config, geometry, model, store = loaded.config, loaded.geometry, loaded.model, loaded.store
    matchers = make_matchers(config, geometry) if generates else None
    lora: WorkerAdapters | LeaderAdapters | None = loaded.adapters
    pools = None if generates else choose_output(config, settings, model)
    if pools is not None:
        geometry = msgspec.structs.replace(geometry, pooling=card_of(config, pools[0], settings, geometry))
        report.note(pools[0].describe())
    send: SendCommand | None = None
    balancer: ExpertBalancer | None = None
    if loaded.ranks is not None and team is not None and team.send is not None:
        send = team.send
        lora = None if loaded.adapters is None else LeaderAdapters(loaded.adapters, send, team)
        model, loaded.pool.mirror = LeaderModel(model, loaded.ranks, send), LeaderPool(send)
        store = None if store is None else LeaderStore(store, send)
    if loaded.experts is not None and config.expert_balance is not None:
        balancer = ExpertBalancer(loaded.experts, config.expert_balance, send, replica_of(config))

    def start_steps(again: Runner) -> None:
        if pools is None:
            backend.start_steps(again, config, report)
        else:
            start_pooled_steps(again, pools[1], backend, config, report)

    hosts = make_hosts(lora, config, loaded.reader, loaded.model)
    runner = Runner(
        model, loaded.pool, geometry, store, start_steps, matchers, config.logprobs_mode, hosts, send, balancer
    )
    if replicas is not None:
        runner.share_experts(replicas)
    start_steps(runner)
    return runner


def make_adapters(
    model: Model,
    undivided: Model | None,
    config: LoraConfig | None,
    backend: Backend,
    report: StartReport,
    reader: AdapterReader | None,
) -> WorkerAdapters | None:
    """Adapts the linear layers of a prepared model. Raises ConfigError for target modules that it does not have.

    undivided: the declared model of which this rank has a part; None: there is one rank.
    """
    if config is None or reader is None:
        return None
    limits = adapter_limits(config, model.table.dtype)
    targets = ModelTargets(model, undivided, fully_sharded=limits.fully_sharded)
    known = {last_name(name) for name in targets.names()}
    if unknown := sorted(set(limits.target_modules) - known):
        raise ConfigError(f"--lora-target-modules: this model has no {', '.join(unknown)}; it has {sorted(known)}")
    places = backend.make_places(model, config.max_loras, limits)
    held, size = f"{config.max_cpu_loras} in host memory", places.size_bytes
    on_device = f", {size / 2**30:.2f} GiB of device memory" if size else ""
    report.note(f"adapters: {config.max_loras} in a step{on_device}, {held}, of rank {config.max_rank} at most")
    return WorkerAdapters(targets, places, limits, reader)


def largest_of(ranks: RankGroup | None) -> LargestOfRanks | None:
    return None if ranks is None else ranks.largest


def start_pooled_steps(
    runner: Runner, output: PoolingOutput, backend: Backend, config: WorkerConfig, report: StartReport
) -> None:
    """Gives the runner steps that pool, and runs a first one. Raises LoadError if its results are not finite."""
    model, pool, geometry = runner.model, runner.pool, runner.geometry
    attention, graphs = backend.chunk_attention(pool, runner.send), backend.packed_graphs(model, config, geometry, pool)
    runner.use(PooledSteps(model, pool, runner.batch, geometry, output, attention, graphs))
    report.phase("first step")
    first_step(runner)
    notes = []
    if graphs is not None:
        report.phase("capturing CUDA graphs")
        with pool.trial_steps():
            notes.append(graphs.capture())
        runner.forget_trial_steps()
    report.phase("ready", 1.0, *notes)


def make_matchers(config: WorkerConfig, geometry: Geometry) -> MatcherProcesses:
    """Makes the processes that make masks of structured output."""
    return MatcherProcesses(
        config.tokenizer_path or config.model_path,
        geometry.vocab_size,
        geometry.eos_token_ids,
        engines=config.grammar_engines,
        num_slots=config.max_num_seqs,
    )


def prepare(model: Model, config: WorkerConfig, max_model_len: int, backend: Backend, report: StartReport) -> None:
    """Prepares weights and picks kernels of linear layers."""
    report.phase("preparing weights")
    on_host = HostWeights(model.linears(), model.table) if model.table.matrices_on_host else None
    report.note(*model.prepare(max_model_len))
    at_once = on_host is not None or config.expert_replicas > 1  # replicas wait for one that measures when idle
    backend.pick_products(model, config, at_once, report)
    if on_host is not None:
        on_host.install()
        report.note(str(on_host))
    report.note(*describe_experts(model.table), *backend.offload_notes(config))


def check(
    build: Build, settings: dict[str, Any], whole: Model, config: WorkerConfig, backend: Backend, stage: Stage | None
) -> HostShare:
    """Checks tensor names, shapes and memory before weights are allocated. Returns the share of the layers' weights
    that stays in host memory.

    whole: the declared model with all layers. stage: of this rank; None: there is one.
    """
    own_products = getattr(whole, "own_products", None)  # of a class of transformers
    if config.batch_invariant and own_products:
        raise ConfigError(
            "--batch-invariant: this model is not, because it runs by its class in transformers, whose "
            f"{', '.join(own_products)} multiply matrices in ways that depend on the number of rows"
        )
    backend.check_shape(whole.shape)
    max_model_len = pick_length(config.max_model_len, whole.shape.max_positions)
    folder, dtype = Path(config.model_path), whole.table.dtype
    checkpoint_check.check_tensors(whole.table, folder, config.load_format, config.ignore_patterns)
    own = whole if stage is None else declare(build, settings, dtype, config, whole.table.shard, stage)

    def place_in(table: WeightTable) -> Model:
        table.stage = stage
        return build(settings, table)

    share = backend.host_share(place_in, dtype, config)
    free, host_bytes = backend.free_bytes(config), share.bytes_of(own.table)
    checkpoint_check.check_memory(own.table, host_bytes, own.shape.head_dim, max_model_len, backend.link, free)
    return share


def held_bytes(config: WorkerConfig) -> int:
    """Returns the bytes of device memory that this process holds."""
    return pick_backend(config.device).held_bytes()


def pick_dtype(name: str, configured: object, backend: Backend) -> torch.dtype:
    """Returns the dtype of the model. configured: that of config.json, if it has one. Raises ConfigError."""
    if name != "auto":
        return DTYPES[name]
    if backend.auto_dtype is not None:
        return backend.auto_dtype
    known = DTYPES.get(configured) if isinstance(configured, str) else None
    if known is None and configured is not None:
        raise ConfigError(f"config.json: dtype {configured!r} is not one of {', '.join(DTYPES)}; --dtype sets one")
    return known or torch.bfloat16


def pick_length(asked: int | None, made_for: int) -> int:
    if asked is not None and asked > made_for:
        raise ConfigError(too_long("--max-model-len", asked, made_for))
    return asked or made_for

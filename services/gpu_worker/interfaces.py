"""The interfaces between the worker loop, its runner and its links. Imports neither torch nor numpy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from blockyard.services.kv_transfer.transfer_blocks import TransferBlocks
from blockyard.shared.bus.member_list import Event
from blockyard.shared.messages import (
    AddedToken,
    Frame,
    Geometry,
    KVAbort,
    KVLanded,
    KVReceive,
    KVSendEnded,
    Member,
    MemoryTag,
    PackedVectors,
    RankStats,
    SlotResult,
    SlotRun,
    Stats,
    StepPlan,
    WorkerIn,
)

if TYPE_CHECKING:
    from blockyard.shared.bus.poller import Readable

Report = Callable[[str, float, list[str]], None]  # of a start: phase, fraction done, notes so far


class DecodeOutputs(Protocol):
    """Results of decode slots, as arrays: each computed one token and sampled one, without logprobs or a finish."""

    def __len__(self) -> int: ...

    def to_slot_results(self) -> list[SlotResult]:
        """Converts the arrays to one `SlotResult` for each slot."""

    def token_ids_by_run(self, runs: Sequence[SlotRun]) -> bytes:
        """Encodes the tokens for StepResult: one uint32 for each run, NO_TOKEN for slots without a result here."""


@dataclass(frozen=True, slots=True)
class CompletedPlan:
    """A plan that has run, and the results of its slots."""

    plan: StepPlan
    slot_results: list[SlotResult]  # results that are not in `decode_outputs`
    stamp_s: float  # CLOCK_REALTIME when the host saw that it had completed
    step_s: float  # from launch to completion, minus the wait for earlier steps
    failed_fetches: list[int]  # blocks that could not be fetched, or were read before another worker's KV had landed
    launch_s: float = 0.0  # host time to launch the step; 0 if the host computes the step
    decode_outputs: DecodeOutputs | None = None
    has_prefill: bool = False  # a slot computed more than one token
    packed: PackedVectors | None = None  # results of a packed step

    @property
    def all_results(self) -> list[SlotResult]:
        """The results of all slots."""
        if self.decode_outputs is None:
            return self.slot_results
        return [*self.decode_outputs.to_slot_results(), *self.slot_results]


@dataclass(frozen=True, slots=True)
class StoredLayers:
    """Layers of a step that runs. `is_stored` tells whether their K and V of all tokens are in the KV cache."""

    layers: range
    is_stored: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that was read into host memory, or the reason that it was not."""

    adapter: int
    digest: bytes = b""
    size_bytes: int = 0
    error: str = ""
    notes: list[str] = field(default_factory=list)
    num_virtual_tokens: int = 0  # of a prompt adapter
    max_len: int = 0  # tokens of its longest sequence; 0: as without it
    num_added_tokens: int = 0  # ids behind the model's vocabulary
    has_tokenizer: bool = False  # prompts of its requests are encoded with the tokenizer in its folder
    added_tokens: list[AddedToken] = field(default_factory=list)  # of that tokenizer
    job: int = 0  # of the load, on a worker with several ranks
    status: int = 400  # HTTP status of the error


class AdapterHost(Protocol):
    """Reads adapters into host memory beside the steps. Implemented by `prompt_adapters.adapter_hosts.AdapterHosts`."""

    @property
    def is_loading(self) -> bool:
        """Whether `poll` will have more to return."""

    def load(self, adapter: int, path: str, *, is_prompt: bool = False) -> None:
        """Begins to read a folder. adapter: the scheduler's number. is_prompt: of a prompt adapter."""

    def drop(self, adapter: int) -> None:
        """Frees an adapter's host memory. No later plan places it."""

    def reset(self) -> None:
        """Drops all adapters, also while they are being read."""

    def poll(self, *, is_idle: bool = False) -> list[LoadedAdapter]:
        """Returns the adapters that were read since the last call. Does not wait, and computes for about a millisecond,
        or some if no step waits for it: `is_idle`."""


class CachedBlocks(Protocol):
    def blocks_and_hashes(self) -> tuple[list[int], bytes]: ...
    def host_blocks_and_hashes(self) -> tuple[list[int], bytes]: ...


class StepRunner(Protocol):
    """Executes plans in launch order. Implemented by `runner.Runner` and by the mock."""

    @property
    def geometry(self) -> Geometry: ...
    @property
    def block_hashes(self) -> CachedBlocks: ...

    @property
    def in_flight(self) -> int:
        """The number of plans that are launched and not collected."""

    def reset(self, num_slots: int) -> None:
        """Waits for plans in flight, then drops their results and all slots. Keeps KV and block hashes."""

    @property
    def adapters(self) -> AdapterHost | None:
        """None: this worker serves no adapters."""

    def reset_prefix_cache(self) -> None:
        """Drops all block hashes, of the pool and of host memory."""

    def can_launch(self) -> bool:
        """Returns False while all buffers for plans in flight are in use."""

    def join_step(self) -> bool:
        """Serves a step of other replicas with the experts of this one. Called when no plan can be launched.

        Returns False if none waits for it.
        """

    def idle(self) -> bool:
        """Does one piece of background work. Called when the worker has no plan. Returns False if no work is left."""

    def launch(self, plan: StepPlan) -> Sequence[StoredLayers]:
        """Starts a plan. A runner without a GPU computes the step before it returns.

        Returns groups of layers in their order, all of the model, if the plan sends blocks and the step tells when
        layers are stored. Otherwise returns nothing: the blocks can be sent once the plan is complete.
        """

    def collect(self) -> list[CompletedPlan]:
        """Returns the completed plans, oldest first, each once. Does not wait."""

    def sample_rows(self) -> None:
        """Samples rows of collected plans that only the host can sample. The results belong to later plans.

        Called once collected plans are answered, because it may take longer than a step.
        """

    def count(self, stats: Stats) -> Stats:
        """Returns the worker's counters and the counters of the runner."""


class OffloadableRunner(StepRunner, Protocol):
    """A runner that can free its memory and take it back later."""

    @property
    def kv_memory(self) -> TransferBlocks:
        """Only for a worker with KV transfers."""

    def release_memory(self, weights: bool = True) -> None:
        """Frees KV memory with its contents. With `weights`, also moves the weights to host memory."""

    def reclaim_memory(self, weights: bool = True, kv: bool = True) -> None:
        """Restores weights, KV memory or both. After both, the runner works again, with an empty KV cache."""


class SleepModeRunner(StepRunner, Protocol):
    """A runner with sleep mode. `reset` wakes it up."""

    @property
    def level(self) -> int:
        """The sleep level; 0: awake."""

    def sleep(self, level: int) -> int:
        """Frees memory by sleep level. Returns the number of bytes freed."""

    def wake(self, parts: Sequence[MemoryTag]) -> int:
        """Restores a part of the memory and stays asleep. Returns the number of bytes that are still freed."""


class KVTransfers(Protocol):
    """Transfers of KV blocks with other workers. Implemented by `transfers.worker_transfers.WorkerTransfers`."""

    @property
    def busy(self) -> bool:
        """Whether `poll` must be called within a millisecond. Otherwise the worker's links wake up when it is due."""

    @property
    def needs_polling(self) -> bool:
        """Whether a GPU copies blocks now, which nothing reports: `poll` must be called without waiting."""

    @property
    def num_open(self) -> int:
        """The number of transfers that have not ended."""

    def open(self) -> None:
        """Begins with the runner's KV memory, unless it has begun already. Call it after the runner is awake."""

    def describe(self, geometry: Geometry) -> Geometry:
        """Returns the geometry with role, layout, generation and endpoint of the KV memory."""

    def open_transfers(self) -> dict[int, list[int]]:
        """This worker's blocks of the transfers that have not ended, by number."""

    def receive(self, frame: KVReceive) -> None: ...
    def abort(self, frame: KVAbort) -> None: ...

    def on_launched(self, plan: StepPlan, stored: Sequence[StoredLayers]) -> None:
        """Starts the sends of a plan whose step runs, layers by layers. A transfer begins with its first send."""

    def on_plan_done(self, plan: StepPlan) -> None:
        """Starts the sends of a plan whose step is complete, unless `on_launched` has."""

    def count(self, stats: Stats) -> Stats:
        """Returns the worker's counters with its transfers', and the receivers of sends since the last call."""

    def on_gone(self, worker: int) -> None:
        """Another member has left the ring."""

    def poll(self) -> list[KVLanded | KVSendEnded]:
        """Moves blocks on. Returns answers for the attached scheduler. Does not wait."""

    def close(self) -> None:
        """Aborts all transfers, before the KV memory is freed. Waits some milliseconds for copies in flight."""


class WorkerRanks(Protocol):
    """The ranks of a worker with several, for its loop. Implemented by `ranks.leader_team.LeaderTeam`."""

    @property
    def failure(self) -> str:
        """Why the device of another rank has failed; empty: none has. All ranks end then."""

    def stats(self) -> list[RankStats]:
        """Returns the state of all ranks."""


class WorkerLinks(Protocol):
    """The methods of `Links` that the worker uses."""

    @property
    def me(self) -> Member: ...
    def poll(self, timeout_s: float) -> "list[tuple[int, Event | WorkerIn]]": ...
    def answer(self, to: int, frame: Frame) -> bool: ...
    def watch(self, *sources: "Readable") -> None: ...
    def unwatch(self, *sources: "Readable") -> None: ...
    def count(self, stats: Stats) -> None: ...

"""Settings of a simulation: the launcher writes them, the simulator reads them."""

import msgspec

from blockyard.shared.config.services.process import ProcessConfig
from blockyard.shared.config.services.scheduler import SchedulerConfig
from blockyard.shared.messages import KVRole


class CostModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Duration of a worker's steps, and its capacity.

    seconds = rows_s(rows) + context_token_s x KV tokens that decodes read + pair_s x (token, earlier token) pairs of
    prefills. Rows are the tokens that the step computes, of decodes and prefills; the table is interpolated linearly. A
    step with fetches from host memory begins fetch_token_s x tokens later; saves run in parallel with steps.

    The defaults are Llama-3.1-8B in bf16 on one H200. The table: CUDA graphs of decode steps with 1, 32, 64 and 256
    rows at context 230 took 4.62, 5.18, 5.64 and 10.41 ms (kernels/PERFORMANCE.md), less their attention, whose 36 ns
    a KV token are 64 sequences of 4,096 tokens in 284 us a layer. A prefill of 2,048 tokens takes 24 us a token,
    of which pairs are 2.4 ms: 524,288 operations a pair at 450 TFLOP/s. A fetch of 1,024 blocks of 16 tokens takes
    41.5 ms.

    KV blocks go from worker to worker with link_bytes_s, link_latency_s after they left. Each worker has one such link
    in either direction. With stream_layers a layer's blocks leave while the next of num_layers layers computes, else
    all at the end of the step. The default link is 85 % of a copy of 1 GB between two H200 of one host.
    """

    name: str = "Llama-3.1-8B, bf16, one H200"
    rows_s: tuple[tuple[int, float], ...] = ((1, 4.61e-3), (32, 4.92e-3), (64, 5.11e-3), (256, 8.3e-3))
    row_s: float = 21.5e-6  # each row beyond the table
    context_token_s: float = 36e-9
    pair_s: float = 1.17e-9
    fetch_token_s: float = 2.53e-6
    hop_s: float = 0.15e-3  # a frame between scheduler and worker, encoded and decoded
    turn_s: float = 0.1e-3  # a step of the scheduler; frames that come meanwhile wait, and are taken together
    link_bytes_s: float = 335e9
    link_latency_s: float = 20e-6
    stream_layers: bool = True
    num_layers: int = 32
    num_blocks: int = 55_000
    token_bytes: int = 131_072  # KV of one token
    max_model_len: int = 131_072  # tokens

    def __post_init__(self) -> None:
        rows = [at for at, _ in self.rows_s]
        if not rows or rows != sorted(set(rows)) or rows[0] < 1:
            raise ValueError(f"rows_s must be points of rising rows from 1 on, got {self.rows_s}")
        times = [self.row_s, self.context_token_s, self.pair_s, self.fetch_token_s, self.hop_s, self.turn_s]
        times += [self.link_latency_s, *(seconds for _, seconds in self.rows_s)]
        if min(times) < 0:
            raise ValueError(f"no time may be below 0, got {min(times)}")
        for name in ("token_bytes", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.link_bytes_s <= 0:
            raise ValueError(f"link_bytes_s must be above 0, got {self.link_bytes_s}")


class SimulatedRole(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The workers of a role, all alike. None: as the simulation's."""

    role: KVRole = KVRole.BOTH
    num_workers: int = 1
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    num_blocks: int | None = None  # of each worker
    num_host_blocks: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_workers", "max_num_seqs", "max_num_batched_tokens", "num_blocks"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")


class LatencyLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of the 99th percentiles, in ms."""

    ttft_ms: float
    itl_ms: float


class SimulatedKill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The worker of a role with the most running sequences dies; another one starts in its place."""

    role: KVRole
    at_s: float  # virtual time


class SimulationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    process: ProcessConfig
    scheduler: SchedulerConfig
    trace: str  # file of JSON lines
    cost: CostModel = CostModel()
    num_workers: int = 1  # if `roles` is empty
    roles: list[SimulatedRole] = []  # each once
    goodput: LatencyLimits | None = None  # find the best roles for as many workers, instead of one simulation
    kills: list[SimulatedKill] = []
    restart_s: float = 10.0  # from a kill until the new worker is ready
    num_blocks: int = 55_000  # of each worker
    num_host_blocks: int = 0  # of each worker
    block_size: int = 16  # tokens
    max_model_len: int = 131_072  # tokens
    html: str = ""  # file for the report; empty: none
    svg: str = ""  # file for four of its charts on one sheet; empty: none

    def __post_init__(self) -> None:
        if len({each.role for each in self.roles}) < len(self.roles):
            raise ValueError(f"roles has one twice: {self.roles}")
        for name in ("num_workers", "num_blocks", "block_size", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("num_host_blocks", "restart_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")

    @property
    def fleet(self) -> list[SimulatedRole]:
        return self.roles or [SimulatedRole(num_workers=self.num_workers)]

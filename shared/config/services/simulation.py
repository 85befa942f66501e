"""Settings of a simulation: the launcher writes them, the simulator reads them."""

import msgspec

from blockyard.shared.config.services.process import ProcessConfig
from blockyard.shared.config.services.scheduler import SchedulerConfig


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
    """

    name: str = "Llama-3.1-8B, bf16, one H200"
    rows_s: tuple[tuple[int, float], ...] = ((1, 4.61e-3), (32, 4.92e-3), (64, 5.11e-3), (256, 8.3e-3))
    row_s: float = 21.5e-6  # each row beyond the table
    context_token_s: float = 36e-9
    pair_s: float = 1.17e-9
    fetch_token_s: float = 2.53e-6
    hop_s: float = 0.15e-3  # a frame between scheduler and worker, encoded and decoded
    num_blocks: int = 55_000
    token_bytes: int = 131_072  # KV of one token
    max_model_len: int = 131_072  # tokens

    def __post_init__(self) -> None:
        rows = [at for at, _ in self.rows_s]
        if not rows or rows != sorted(set(rows)) or rows[0] < 1:
            raise ValueError(f"rows_s must be points of rising rows from 1 on, got {self.rows_s}")
        times = [self.row_s, self.context_token_s, self.pair_s, self.fetch_token_s, self.hop_s]
        times += [seconds for _, seconds in self.rows_s]
        if min(times) < 0:
            raise ValueError(f"no time may be below 0, got {min(times)}")
        if self.token_bytes < 1:
            raise ValueError(f"token_bytes must be >= 1, got {self.token_bytes}")


class SimulationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    process: ProcessConfig
    scheduler: SchedulerConfig
    trace: str  # file of JSON lines
    cost: CostModel = CostModel()
    num_workers: int = 1
    num_blocks: int = 55_000  # of each worker
    num_host_blocks: int = 0  # of each worker
    block_size: int = 16  # tokens
    max_model_len: int = 131_072  # tokens
    html: str = ""  # file for the report; empty: none
    svg: str = ""  # file for four of its charts on one sheet; empty: none

    def __post_init__(self) -> None:
        for name in ("num_workers", "num_blocks", "block_size", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.num_host_blocks < 0:
            raise ValueError(f"num_host_blocks must be >= 0, got {self.num_host_blocks}")

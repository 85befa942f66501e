"""The settings of a world: of its scheduler and workers, and which faults happen."""

from dataclasses import dataclass, field
from typing import Literal

from blockyard.services.scheduler.planning.partial_prefill_limits import PartialPrefillLimits
from blockyard.shared.messages import KVRole


@dataclass(frozen=True, kw_only=True)
class Shape:
    depth: int | None = 1
    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int = 64
    eos_every: int = 0
    max_queue_len: int = 100
    max_queue_tokens: int = 10_000
    max_queue_delay_s: float | None = None
    whole_prompts: bool = False
    partial_prefills: PartialPrefillLimits = field(default_factory=PartialPrefillLimits)
    delay_factor: float = 0.0
    late_masks: bool = False  # sometimes a row gets no token
    host_waits: int = 0  # steps that every third request gets no token in, after each of its tokens
    prefix_caching: bool = True
    policy: str = "fcfs"
    may_sleep: bool = True
    num_host_blocks: int = 0
    window: int | None = None  # tokens, of every layer
    roles: tuple[KVRole, ...] = (KVRole.BOTH,)  # of the workers, in turn
    decode_prefill_tokens: int = 0
    kv_lease_s: float = 5.0
    load_failure_policy: Literal["recompute", "fail"] = "recompute"
    pooling: str = ""  # "encoder", "last" or "mean": the workers make vectors
    reserve_whole_prompts: bool = True
    watermark: float | None = None
    num_adapter_places: int = 0  # of each worker
    num_host_adapters: int = 0
    num_adapters: int = 0  # that requests may name: "a0", "a1", ...
    num_prompt_adapters: int = 0  # "p0", "p1", ..., each of VIRTUAL_TOKENS
    num_stages: int = 1  # pipeline stages of each worker
    balanced_context: int = 0  # with stages
    failing: bool = False  # sometimes a fetch from host memory fails

    @property
    def limit(self) -> int:
        """Tokens of the longest sequence."""
        if self.window is not None and self.num_blocks >= -(-self.window // self.block_size) + 2:
            return self.max_model_len
        return min(self.max_model_len, self.num_blocks * self.block_size)

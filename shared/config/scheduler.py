"""Settings of a scheduler."""

from typing import Literal

import msgspec

from blockyard.shared.config.process import ProcessConfig


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Block count, block size, model length and vocabulary come with the workers' Geometry, not from here."""

    process: ProcessConfig
    served_model_names: list[str]  # the first is echoed in answers
    root: str = ""  # path or hub name of the weights, as /v1/models shows it
    max_num_seqs: int = 256  # choices in the batch
    max_num_batched_tokens: int = 2048  # of one step
    enable_chunked_prefill: bool = True
    scheduling_policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    enable_prefix_caching: bool = True
    block_scope: str = ""  # as the tokenizers have it: names of generated blocks go on from theirs
    depth: int | None = None  # plans sent ahead of the running one; 0 is lockstep, None: by the worker's step time
    max_queue_len: int = 1024  # waiting requests
    max_queue_tokens: int = 2**22  # prompt tokens of waiting requests
    max_queue_delay_s: float | None = None  # a newcomer that would wait longer, or has, is refused
    log_stats: bool = True
    stats_interval_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_queue_len", "max_queue_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.depth is not None and self.depth < 0:
            raise ValueError(f"depth must be >= 0, got {self.depth}")

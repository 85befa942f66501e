"""Settings of a scheduler."""

from typing import Literal

import msgspec

from blockyard.shared.config.services.lora import AdapterSettings
from blockyard.shared.config.services.process import ProcessConfig
from blockyard.shared.config.services.worker import USUAL_SEQS
from blockyard.shared.messages import ModelSettings


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The workers' Geometry has block count, block size, model length and vocabulary."""

    process: ProcessConfig
    served_model_names: list[str]  # the first is echoed in answers
    root: str = ""  # path or hub name of the weights, as /v1/models shows it
    model: ModelSettings = ModelSettings()  # what gateways get on the model's card
    max_num_seqs: int = USUAL_SEQS  # sequences in the batch
    max_num_batched_tokens: int = 2048  # of one step
    enable_chunked_prefill: bool = True
    scheduling_policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    delay_factor: float = 0.0  # the next prompt waits this many times the duration of the last step with a prompt
    max_num_partial_prefills: int = 1  # prompts that may be partly computed at a time
    max_long_partial_prefills: int = 1  # long prompts among them
    long_prefill_token_threshold: int = 0  # longer prompts are long; 0: 4 % of the model's length
    enable_prefix_caching: bool = True
    block_scope: str = ""  # as the tokenizers': hashes of generated blocks continue theirs
    depth: int | None = None  # plans sent ahead of the running one; 0: synchronous; None: by the worker's step time
    max_queue_len: int = 1024  # waiting sequences; all texts of a call of a pooling model are one
    max_queue_tokens: int = 2**22  # known tokens of waiting sequences
    max_queue_delay_s: float | None = None  # a new request that would wait longer, or has, is refused
    decode_prefill_tokens: int = 128  # a prompt of which a decode group lacks no more is computed there
    kv_lease_s: float = 30.0  # after a transfer's last block was sent, before its workers are asked about it
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"  # of blocks that did not land
    enable_sleep_mode: bool = False
    log_stats: bool = True
    stats_interval_s: float = 10.0
    reserve_whole_prompts: bool = True  # a prompt starts with KV blocks for all of its tokens
    adapters: AdapterSettings = AdapterSettings()
    watermark: float | None = None  # fraction of KV blocks that a sequence leaves free when it starts; None: 0.01

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_queue_len", "max_queue_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not 1 <= self.max_long_partial_prefills <= self.max_num_partial_prefills:
            raise ValueError(
                f"max_long_partial_prefills must be 1 to max_num_partial_prefills, {self.max_num_partial_prefills}, "
                f"got {self.max_long_partial_prefills}"
            )
        if self.max_num_partial_prefills > 1 and not self.enable_chunked_prefill:
            raise ValueError(f"max_num_partial_prefills {self.max_num_partial_prefills} needs chunked prefill")
        if self.depth is not None and self.depth < 0:
            raise ValueError(f"depth must be >= 0, got {self.depth}")

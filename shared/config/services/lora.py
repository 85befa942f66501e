"""Settings of adapters: what a worker holds, and which adapters a deployment begins with."""

from typing import Literal

import msgspec


class LoraConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A worker's limits."""

    max_loras: int = 1  # adapters on the device: those that one step may use
    max_cpu_loras: int = 1  # adapters in host memory
    max_rank: int = 16
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"  # of the matrices; auto: the model's
    with_bias: bool = False  # adapters may have biases
    extra_vocab_size: int = 256  # rows of tokens that an adapter may replace, of embedding and of head
    target_modules: list[str] = []  # last parts of names of modules that adapters may change; empty: all
    with_experts: bool = False  # without target_modules, adapters on a device may change experts, too
    long_factors: list[int] = []  # of the model's context, that adapters for longer contexts may have
    fully_sharded: bool = False  # ranks divide both matrices of a pair, and not only the one that the layer divides

    def __post_init__(self) -> None:
        if self.max_loras < 1:
            raise ValueError(f"max_loras must be >= 1, got {self.max_loras}")
        if self.max_cpu_loras < self.max_loras:
            raise ValueError(f"max_cpu_loras {self.max_cpu_loras} is less than max_loras, {self.max_loras}")


class PromptConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A worker's limits of prompt adapters. Their vectors are in host memory."""

    max_adapters: int = 64  # that are loaded at a time
    max_tokens: int  # virtual tokens of one

    def __post_init__(self) -> None:
        if self.max_adapters < 1 or self.max_tokens < 1:
            raise ValueError(f"prompt adapters: {self.max_adapters} of {self.max_tokens} tokens; at least 1 is needed")


class AdapterSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An adapter that is served from the start: --lora-modules and --prompt-adapters."""

    name: str
    path: str
    parent: str = ""  # shown as its base; empty: the first served name
    is_prompt: bool = False  # a prompt adapter; False: a LoRA adapter
    has_experts: bool = False  # it changes experts of a mixture, as far as the launcher knows


class AdapterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A scheduler's settings of adapters."""

    sources: list[AdapterSource] = []
    leaves_out_broken: bool = False  # a source that cannot be read; else the scheduler ends
    max_wait_s: float = 2.0  # for a place, before the least recently used adapter takes no new sequences

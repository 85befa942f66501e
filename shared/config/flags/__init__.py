"""All flags by group: one declaration per flag."""

from blockyard.shared.config.flags import engine, execution, features, model, ring, roles, server, vllm_only
from blockyard.shared.config.flags.flag import Flag

GROUPS: dict[str, tuple[Flag, ...]] = {
    "HTTP server": server.SERVER,
    "Security": server.SECURITY,
    "Model": model.MODEL,
    "Loading": model.LOADING,
    "Tokenizer": model.TOKENIZER,
    "Scheduling": engine.SCHEDULER,
    "KV memory": engine.CACHE,
    "Execution": execution.EXECUTION,
    "Parallelism": engine.PARALLEL,
    "Prefill and decode workers": roles.ROLES,
    "The ring": ring.RING,
    "Observability": features.OBSERVABILITY,
    "Mock worker": ring.MOCK,
    "Quantization": features.QUANTIZATION,
    "Adapters": features.LORA,
    "Speculative decoding": features.SPECULATIVE,
    "Images": features.MULTIMODAL,
    "Structured output and tools": features.STRUCTURED,
}

FLAGS: dict[str, Flag] = {flag.name: flag for group in (*GROUPS.values(), *vllm_only.GROUPS.values()) for flag in group}

# By name and other names: keys of YAML files, Python keywords and environment variables.
NAMES: dict[str, Flag] = FLAGS | {name: flag for flag in FLAGS.values() for name in flag.other_names}

SPELLINGS: dict[str, Flag] = NAMES | {alias: flag for flag in FLAGS.values() for alias in flag.short_names}

"""Flags of scheduling, KV memory and weights in host memory that only vLLM has."""

from functools import partial

from blockyard.shared.config.flags.flag import Flag, FlagKind, not_built, switch

_OFFLOAD = not_built("a choice of the weights in host memory; --cpu-offload-gb says how many, experts first")
_offload = partial(Flag, refused=_OFFLOAD)

SCHEDULING = (
    Flag(
        "max-num-active-seqs",
        None,
        "Most sequences that run at a time.",
        ge=1,
        mapped="the same as --max-num-seqs, where that is not lower",
        kind=FlagKind.INT,
    ),
    Flag(
        "max-num-scheduled-tokens",
        None,
        "Most tokens that a step schedules.",
        ge=1,
        mapped="the same as --max-num-batched-tokens, where that is not lower",
        kind=FlagKind.SIZE,
    ),
    switch(
        "long-prefill-token-threshold-adaptive",
        "Let the threshold of long prompts grow with the tokens of a step.",
        mapped="without --long-prefill-token-threshold, a prompt of more than 4 % of the context length is long",
    ),
    Flag(
        "prefill-schedule-interval",
        1,
        "Steps between two starts of prompts.",
        ge=1,
        refused=not_built("prompts in every Nth step; use --scheduler-delay-factor"),
    ),
    Flag(
        "scheduler-cls",
        None,
        "Own class of the scheduler.",
        refused="no code from outside runs in the scheduler; use --scheduling-policy",
    ),
    switch(
        "disable-hybrid-kv-cache-manager",
        "One size of KV memory for all kinds of layers.",
        mapped="layers of all kinds share one table of blocks",
    ),
    Flag(
        "kv-offloading-size",
        None,
        "Host memory for KV blocks, in GiB.",
        ge=0,
        mapped="the same as --swap-space",
        kind=FlagKind.FLOAT,
    ),
    Flag(
        "kv-offloading-backend",
        "native",
        "What keeps KV blocks in host memory.",
        choices=("native",),
        refused_values={"lmcache": not_built("LMCache; use native")},
        mapped="KV blocks in host memory are kept by the worker",
    ),
    Flag(
        "kv-cache-dtype-skip-layers",
        [],
        "Layers whose KV is not quantized.",
        refused=not_built("types of KV by layer; --kv-cache-dtype is for all"),
    ),
    Flag(
        "kv-events-config",
        None,
        "Publish events of KV blocks.",
        refused=not_built("events of KV blocks; the scheduler routes by prefixes itself"),
        harmless=({},),
        kind=FlagKind.JSON,
    ),
    switch(
        "kv-sharing-fast-prefill",
        "Skip prompt tokens in layers that share KV.",
        refused=not_built("layers that skip prompt tokens"),
    ),
    Flag(
        "prefix-cache-retention-interval",
        None,
        "Tokens between kept states of sliding windows.",
        ge=0,
        mapped="KV of sliding windows stays in the prefix cache as long as there is room for it",
        kind=FlagKind.INT,
    ),
    Flag(
        "prefix-caching-hash-algo",
        None,
        "Hash of KV blocks.",
        choices=("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"),
        mapped="blocks are hashed by BLAKE2b, whose collisions nobody can provoke",
    ),
    Flag(
        "prefix-match-unit",
        None,
        "Fewest tokens of a match in the prefix cache.",
        ge=1,
        mapped="matches end at any token: the last block of one is copied",
        kind=FlagKind.INT,
    ),
    Flag(
        "swa-bounded-replay",
        True,
        "Compute the last window of a cached prefix again.",
        mapped="KV of sliding windows is in the prefix cache",
    ),
    _offload("cpu-offload-params", [], "Parts of the names of weights in host memory."),
    Flag(
        "offload-backend",
        "auto",
        "How weights in host memory are read.",
        choices=("auto", "uva", "prefetch"),
        mapped="--cpu-offload-gb reads weights in host memory in the way that is built in",
    ),
    _offload("offload-group-size", 0, "Layers of a group.", ge=0),
    _offload("offload-num-in-group", 1, "Layers of a group in host memory.", ge=1),
    _offload("offload-params", [], "Parts of the names of weights that are read ahead."),
    _offload("offload-prefetch-step", 1, "Layers that are read ahead.", ge=0),
)

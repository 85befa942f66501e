"""Flags of prefill and decode workers, and of the transfers of KV blocks between them."""

from dataclasses import replace

from blockyard.shared.config.flags import engine, execution, ring
from blockyard.shared.config.flags.flag import Flag, FlagKind

ROLE_NAMES = ("prefill", "decode")
# flags that prefill and decode workers may set apart: block hashes, KV blocks and outputs do not depend on them
PER_ROLE = (
    *("max-num-batched-tokens", "max-num-seqs", "gpu-memory-utilization", "num-gpu-blocks-override"),
    *("kv-cache-memory-bytes", "cpu-kv-gib", "swap-space", "cpu-offload-gb", "cpu-threads", "compilation-config"),
    *("mock-blocks", "mock-step-ms", "tensor-parallel-size", "pipeline-parallel-size", "pipeline-layers"),
)


def _of_role(role: str, flag: Flag) -> Flag:
    """The same flag for the workers of a role. `prefill.max-num-seqs` is `prefill_max_num_seqs` in Python."""
    return replace(
        flag,
        name=f"{role}.{flag.name}",
        default=None,
        help=f"--{flag.name} of {role} workers; unset: as the others.",
        to=(),
        short_names=(),
        other_names=(f"{role}-{flag.name}",),
        mapped="",
    )


_DECLARED = {
    flag.name: flag
    for group in (engine.PARALLEL, engine.SCHEDULER, engine.CACHE, execution.EXECUTION, ring.MOCK)
    for flag in group
}

ROLES = (
    Flag(
        "prefill-workers",
        0,
        "`serve`: workers that compute prompts and hand their KV blocks to decode workers. With these or "
        "--decode-workers, --data-parallel-size adds workers of both roles only if it is given.",
        ge=0,
        le=1024,
    ),
    Flag(
        "decode-workers",
        0,
        "`serve`: workers that continue prompts which prefill workers have computed.",
        ge=0,
        le=1024,
    ),
    Flag(
        "role",
        None,
        "`run gpu-worker`: what this worker is preferred for; without live workers of a role the others do its work.",
        choices=("prefill", "decode", "both"),
    ),
    Flag(
        "kv-transfer-config",
        None,
        "Transfers of KV blocks between workers: `kv_role` (kv_producer: prefill, kv_consumer: decode, kv_both), "
        "`kv_connector` (auto, cuda_ipc, shm, tcp, nixl), `kv_ip`, `kv_port`, `kv_load_failure_policy` and, in "
        "`kv_connector_extra_config`, `backends`, `kv_lease_duration`, `encrypt`, `checksum`. Also one key at a time: "
        "--kv-transfer-config.kv_role kv_both.",
        kind=FlagKind.JSON,
    ),
    Flag(
        "decode-prefill-tokens",
        128,
        "A decode worker computes the rest of a prompt itself if no more tokens than this are missing; 0: none.",
        ("scheduler.decode_prefill_tokens",),
        ge=0,
    ),
    Flag(
        "pd-faults",
        None,
        "For tests: faults of a worker's KV transfers, as drop=0.01,delay=50ms,flip=0.001.",
    ),
    *(_of_role(role, _DECLARED[name]) for role in ROLE_NAMES for name in PER_ROLE),
    *(
        Flag(
            f"{role}.data-parallel-size",
            1,
            f"Replicas of each of the --{role}-workers. With --enable-expert-parallel they have its experts together.",
            other_names=(f"{role}-data-parallel-size",),
            ge=1,
            le=1024,
        )
        for role in ROLE_NAMES
    ),
)

"""Flags of the execution of steps, and of the device."""

from blockyard.shared.config.flags.flag import FOREIGN, Flag, FlagKind, switch

_GRAPHS = "decode steps of any length are in CUDA graphs; --enforce-eager turns them off"

EXECUTION = (
    switch("enforce-eager", "No CUDA graphs.", ("worker.enforce_eager",)),
    switch(
        "batch-invariant",
        "A sequence's logits do not depend on the rest of its batch; slower.",
        ("worker.batch_invariant",),
    ),
    Flag(
        "expert-metrics",
        True,
        "Sample how often each expert of a mixture is chosen, for /metrics.",
        ("worker.expert_metrics",),
    ),
    Flag("max-seq-len-to-capture", None, "Longest sequence in CUDA graphs.", ge=1, mapped=_GRAPHS, kind=FlagKind.INT),
    Flag(
        "max-context-len-to-capture", None, "Longest sequence in CUDA graphs.", ge=1, mapped=_GRAPHS, kind=FlagKind.INT
    ),
    Flag(
        "compilation-config",
        None,
        "Level 0 to 3, or a JSON object with `level`, `use_cudagraph`, `cudagraph_capture_sizes`.",
        short_names=("O", "cc"),
        takes_json=True,
        mapped="level 0 is --enforce-eager; 1 is kernels written by hand, in CUDA graphs; 2, the default,"
        " and 3 also fuse kernels of a layer where a step has few rows; no torch.compile",
    ),
    Flag(
        "optimization-level",
        None,
        "0 to 3 or O0 to O3: the level of --compilation-config.",
        choices=("0", "1", "2", "3", "O0", "O1", "O2", "O3"),
    ),
    Flag(
        "cudagraph-capture-sizes",
        [],
        "Batch sizes captured in CUDA graphs; unset: those of --compilation-config, or a usual list.",
        ge=1,
        kind=FlagKind.INTS,
    ),
    Flag(
        "max-cudagraph-capture-size",
        None,
        "Largest batch size captured in CUDA graphs; unset: --max-num-seqs.",
        ge=1,
        kind=FlagKind.INT,
    ),
    Flag(
        "performance-mode",
        "balanced",
        "throughput: twice the usual --max-num-seqs and --max-num-batched-tokens, where they are not given; "
        "interactivity: a CUDA graph for each batch size up to 32.",
        choices=("balanced", "interactivity", "throughput"),
    ),
    switch(
        "enable-sleep-mode",
        "Allow POST /sleep, which frees the memory of weights and KV until POST /wake_up.",
        ("scheduler.enable_sleep_mode",),
    ),
    Flag(
        "device",
        "auto",
        "Device of the model; auto: a GPU if there is one.",
        ("worker.device",),
        choices=("auto", "cuda", "cpu"),
        refused_values=dict.fromkeys(("neuron", "openvino", "tpu", "xpu", "hpu"), FOREIGN),
    ),
    Flag("override-neuron-config", None, "Settings of Neuron devices.", refused=FOREIGN, kind=FlagKind.JSON),
    Flag(
        "kernel-cache",
        None,
        "Folder of compiled GPU kernels and measured layer plans, written by `blockyard tune` and by every start;"
        " unset: ~/.triton and ~/.cache/blockyard.",
        ("worker.kernel_cache",),
    ),
    Flag(
        "cpu-threads",
        0,
        "Compute threads on CPU; 0: cores minus one, of encoders all cores.",
        ("worker.threads",),
        ge=0,
    ),
)

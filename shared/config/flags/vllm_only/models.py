"""Flags of models, weights, drafts, states, adapters and media that only vLLM has."""

from functools import partial

from blockyard.shared.config.flags.flag import Flag, FlagKind, not_built, switch

_SPECULATION = not_built("speculative decoding")
_STATES = not_built("Mamba and other models with a state in place of KV")
_ADAPTERS = not_built("adapters of this kind")
_WHOLE_SLEEP = "--enable-sleep-mode is enough: CUDA graphs and links stay, weights and KV memory are freed"

_drafts = partial(Flag, refused=_SPECULATION)
_states = partial(Flag, refused=_STATES)
_adapters = partial(Flag, refused=_ADAPTERS)
_media = partial(Flag, refused=not_built("image and video input"))

MODELS = (
    Flag(
        "additional-config",
        None,
        "Settings of a platform.",
        refused="the platforms here, cuda and cpu, have no settings besides flags; leave it out",
        harmless=({},),
        kind=FlagKind.JSON,
    ),
    switch(
        "allow-deprecated-quantization",
        "Allow old quantization methods.",
        mapped="a method is either supported or refused by its name",
    ),
    Flag(
        "aux-output-config",
        None,
        "Outputs of a step besides tokens.",
        refused=not_built("outputs besides tokens and log-probabilities"),
        harmless=({},),
        kind=FlagKind.JSON,
    ),
    Flag(
        "convert",
        "auto",
        "Use a model for another task.",
        choices=("auto", "none", "embed", "classify", "reward"),
        refused_values={"mm_encoder_only": not_built("encoders of images alone")},
        mapped="--task of the same name",
    ),
    Flag("diffusion-config", None, "Diffusion models.", refused=not_built("diffusion models"), kind=FlagKind.JSON),
    switch(
        "enable-cumem-allocator",
        "Allocate memory that can be freed in sleep.",
        mapped=_WHOLE_SLEEP,
    ),
    Flag(
        "enable-flash-late-interaction",
        True,
        "Score late interaction on the GPU.",
        mapped="there are no models of late interaction, whose scores it computes",
    ),
    switch("enable-nccl-comm-suspend", "Free NCCL's memory in sleep.", mapped=_WHOLE_SLEEP),
    switch(
        "enable-prompt-embeds",
        "Take prompts as embeddings.",
        refused=not_built("prompts as embeddings; use text or token ids"),
    ),
    switch(
        "enable-return-routed-experts",
        "Return the chosen experts of each token.",
        refused=not_built("chosen experts in answers; --expert-metrics samples them for /metrics"),
    ),
    switch(
        "enable-trace-replay",
        "Let requests say which tokens are sampled.",
        refused=not_built("sampling of given tokens; `prompt_logprobs` scores given text"),
    ),
    Flag(
        "engram-config",
        None,
        "Where n-gram embeddings are.",
        refused=not_built("models with n-gram embeddings"),
        kind=FlagKind.JSON,
    ),
    Flag(
        "io-processor-plugin",
        None,
        "Plugin that reads prompts and writes outputs.",
        refused=not_built("such plugins; use --tool-parser-plugin, --reasoning-parser-plugin or --logits-processors"),
    ),
    Flag(
        "model-class-overrides",
        None,
        "Own classes for architectures.",
        refused="no code from outside runs as a model; use --model-impl transformers for others than the built-in ones",
        harmless=({},),
        kind=FlagKind.JSON,
    ),
    Flag(
        "pt-load-map-location",
        "cpu",
        "Device to which files of PyTorch are read.",
        takes_json=True,
        mapped="weights are read in host memory and copied to the worker's device",
    ),
    Flag(
        "quantization-config",
        None,
        "Quantization of each kind of layer.",
        refused=not_built(
            "a method for each kind of layer; --quantization has one for all, and files of a checkpoint may"
        ),
        harmless=({},),
        kind=FlagKind.JSON,
    ),
    switch(
        "return-sampling-mask",
        "Return the tokens that a draw chose among.",
        refused=not_built("candidates of a draw in answers; `logprobs` shows the most likely ones"),
    ),
    Flag(
        "runner",
        "auto",
        "What the model is run for.",
        choices=("auto", "generate", "pooling"),
        refused_values={"draft": _SPECULATION},
        mapped="generate is --task generate, and pooling the model's other task",
    ),
    Flag(
        "sleep-mode-backend",
        None,
        "How memory is freed in sleep.",
        mapped=_WHOLE_SLEEP,
    ),
    switch("sleep-mode-offload-cudagraph", "Free CUDA graphs in sleep.", mapped=_WHOLE_SLEEP),
    Flag(
        "sleep-preserve-parameter-names",
        [],
        "Weights that stay in memory at level 2 of sleep.",
        refused=not_built("a choice of weights that stay; level 1 of sleep keeps all in host memory"),
    ),
    switch(
        "use-fp64-gumbel",
        "Draw with noise of 64 bits.",
        refused=not_built("noise of 64 bits; draws have noise of 32 bits"),
    ),
    Flag(
        "weight-transfer-config",
        None,
        "Weights from a training process.",
        refused=not_built("weights from a training process; restart a worker with the new checkpoint"),
        kind=FlagKind.JSON,
    ),
    Flag(
        "worker-extension-cls",
        "",
        "Class whose methods workers get.",
        refused="no code from outside runs in a worker but --logits-processors; use those",
    ),
)

SPECULATION = (
    _drafts("spec-method", None, "How drafts are made."),
    _drafts("spec-model", None, "Draft model."),
    _drafts("spec-tokens", None, "Tokens drafted in a step.", ge=0, harmless=(0,), kind=FlagKind.INT),
    _drafts("speculative-config", None, "Settings of drafts.", short_names=("sc",), harmless=({},), kind=FlagKind.JSON),
)

STATES = (
    _states("enable-mamba-cache-stochastic-rounding", False, "Round states at random."),
    _states("enable-mamba-shared-prefix-checkpoint", False, "Keep states where prefixes part."),
    _states("mamba-backend", None, "Kernels of states.", harmless=("auto", "triton", "TRITON")),
    _states("mamba-block-size", None, "Tokens between two states in the prefix cache.", ge=1, kind=FlagKind.INT),
    _states("mamba-cache-dtype", "auto", "Type of states."),
    _states("mamba-cache-mode", "none", "Which states the prefix cache keeps."),
    _states("mamba-cache-philox-rounds", 0, "Rounds of the random numbers of rounding.", ge=0),
    _states("mamba-ssm-cache-dtype", "auto", "Type of states without those of convolutions."),
    _states("mamba-ssu-algorithm", None, "Algorithm of the state's update.", harmless=("auto",)),
    _states("replayssm-buffer-len", 16, "Tokens that ReplaySSM repeats.", ge=1),
    _states("use-replayssm", False, "Compute states anew in place of writing each."),
)

ADAPTERS = (
    _adapters("enable-mixed-moe-lora-format", False, "Adapters of experts in two formats."),
    _adapters("enable-moe-shared-loras", False, "Adapters that experts share."),
    _adapters("enable-tower-connector-lora", False, "Adapters of image encoders."),
    _adapters("default-mm-loras", None, "Adapters by kind of media.", harmless=({},), kind=FlagKind.JSON),
    _adapters("max-lora-cls-labels", None, "Labels of an adapter that classifies.", ge=1, kind=FlagKind.INT),
    _adapters("specialize-active-lora", False, "CUDA graphs by number of adapters."),
)

MEDIA = (
    _media("allowed-media-domains", [], "Hosts that media may be fetched from."),
    _media("disable-chunked-mm-input", False, "Never divide an image between two steps."),
    _media("ec-manager-config", None, "Who keeps the outputs of encoders.", harmless=({},), kind=FlagKind.JSON),
    _media("ec-transfer-config", None, "Transfers of the outputs of encoders.", harmless=({},), kind=FlagKind.JSON),
    _media("enable-mm-embeds", False, "Take embeddings of images."),
    _media("interleave-mm-strings", False, "Keep images between texts where they stand."),
    switch(
        "language-model-only",
        "Load no encoders.",
        mapped="only the language model is ever loaded",
    ),
    _media("media-io-kwargs", None, "Settings of the readers of media.", harmless=({},), kind=FlagKind.JSON),
    _media("mm-device-do-normalize", False, "Normalize images on the GPU."),
    _media("mm-encoder-attn-backend", None, "Kernels of encoders' attention."),
    _media("mm-encoder-attn-dtype", None, "Type of encoders' attention."),
    _media("mm-encoder-fp8-scale-path", None, "Scales of encoders' attention."),
    _media("mm-encoder-fp8-scale-save-margin", 1.5, "Margin of scales that are saved."),
    _media("mm-encoder-fp8-scale-save-path", None, "Where scales are saved."),
    _media("mm-encoder-only", False, "Run encoders alone."),
    _media("mm-encoder-tp-mode", "weights", "How several GPUs share an encoder."),
    _media("mm-hasher-algorithm", "blake3", "Hash of media."),
    _media("mm-ipc-gpu-memory-gb", 0.0, "GPU memory for decoding media, in GiB.", ge=0),
    _media("mm-processor-cache-gb", 4.0, "Memory of processed media, in GiB.", ge=0, harmless=(0.0,)),
    _media("mm-processor-cache-type", "lru", "Kind of that memory."),
    _media("mm-processor-device", "auto", "Device that processes media."),
    _media("mm-shm-cache-max-object-size-mb", 128, "Largest processed item, in MiB.", ge=1),
    _media("mm-tensor-ipc", "direct_rpc", "How processed media get to workers."),
    switch(
        "skip-mm-profiling",
        "Do not measure encoders at the start.",
        mapped="only the language model is ever loaded",
    ),
    _media("trust-request-mm-kwargs", False, "Let requests set how media are processed."),
    _media("video-pruning-method", "evs", "How tokens of videos are dropped."),
    _media("video-pruning-rate", None, "Share of tokens of videos that are dropped.", ge=0, le=1, kind=FlagKind.FLOAT),
)

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
        FlagKind.JSON,
        None,
        "Settings of a platform.",
        refused="the platforms here, cuda and cpu, have no settings besides flags; leave it out",
        harmless=({},),
    ),
    switch(
        "allow-deprecated-quantization",
        "Allow old quantization methods.",
        mapped="a method is either supported or refused by its name",
    ),
    Flag(
        "aux-output-config",
        FlagKind.JSON,
        None,
        "Outputs of a step besides tokens.",
        refused=not_built("outputs besides tokens and log-probabilities"),
        harmless=({},),
    ),
    Flag(
        "convert",
        FlagKind.TEXT,
        "auto",
        "Use a model for another task.",
        choices=("auto", "none", "embed", "classify", "reward"),
        refused_values={"mm_encoder_only": not_built("encoders of images alone")},
        mapped="--task of the same name",
    ),
    Flag("diffusion-config", FlagKind.JSON, None, "Diffusion models.", refused=not_built("diffusion models")),
    switch(
        "enable-cumem-allocator",
        "Allocate memory that can be freed in sleep.",
        mapped=_WHOLE_SLEEP,
    ),
    Flag(
        "enable-flash-late-interaction",
        FlagKind.BOOL,
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
        FlagKind.JSON,
        None,
        "Where n-gram embeddings are.",
        refused=not_built("models with n-gram embeddings"),
    ),
    Flag(
        "io-processor-plugin",
        FlagKind.TEXT,
        None,
        "Plugin that reads prompts and writes outputs.",
        refused=not_built("such plugins; use --tool-parser-plugin, --reasoning-parser-plugin or --logits-processors"),
    ),
    Flag(
        "model-class-overrides",
        FlagKind.JSON,
        None,
        "Own classes for architectures.",
        refused="no code from outside runs as a model; use --model-impl transformers for others than the built-in ones",
        harmless=({},),
    ),
    Flag(
        "pt-load-map-location",
        FlagKind.TEXT,
        "cpu",
        "Device to which files of PyTorch are read.",
        takes_json=True,
        mapped="weights are read in host memory and copied to the worker's device",
    ),
    Flag(
        "quantization-config",
        FlagKind.JSON,
        None,
        "Quantization of each kind of layer.",
        refused=not_built("quantization of weights while they are loaded; use a checkpoint that is quantized"),
        harmless=({},),
    ),
    switch(
        "return-sampling-mask",
        "Return the tokens that a draw chose among.",
        refused=not_built("candidates of a draw in answers; `logprobs` shows the most likely ones"),
    ),
    Flag(
        "runner",
        FlagKind.TEXT,
        "auto",
        "What the model is run for.",
        choices=("auto", "generate", "pooling"),
        refused_values={"draft": _SPECULATION},
        mapped="generate is --task generate, and pooling the model's other task",
    ),
    Flag(
        "sleep-mode-backend",
        FlagKind.TEXT,
        None,
        "How memory is freed in sleep.",
        mapped=_WHOLE_SLEEP,
    ),
    switch("sleep-mode-offload-cudagraph", "Free CUDA graphs in sleep.", mapped=_WHOLE_SLEEP),
    Flag(
        "sleep-preserve-parameter-names",
        FlagKind.LIST,
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
        FlagKind.JSON,
        None,
        "Weights from a training process.",
        refused=not_built("weights from a training process; restart a worker with the new checkpoint"),
    ),
    Flag(
        "worker-extension-cls",
        FlagKind.TEXT,
        "",
        "Class whose methods workers get.",
        refused="no code from outside runs in a worker but --logits-processors; use those",
    ),
)

SPECULATION = (
    _drafts("spec-method", FlagKind.TEXT, None, "How drafts are made."),
    _drafts("spec-model", FlagKind.TEXT, None, "Draft model."),
    _drafts("spec-tokens", FlagKind.INT, None, "Tokens drafted in a step.", ge=0, harmless=(0,)),
    _drafts("speculative-config", FlagKind.JSON, None, "Settings of drafts.", short_names=("sc",), harmless=({},)),
)

STATES = (
    _states("enable-mamba-cache-stochastic-rounding", FlagKind.BOOL, False, "Round states at random."),
    _states("enable-mamba-shared-prefix-checkpoint", FlagKind.BOOL, False, "Keep states where prefixes part."),
    _states("mamba-backend", FlagKind.TEXT, None, "Kernels of states.", harmless=("auto", "triton", "TRITON")),
    _states("mamba-block-size", FlagKind.INT, None, "Tokens between two states in the prefix cache.", ge=1),
    _states("mamba-cache-dtype", FlagKind.TEXT, "auto", "Type of states."),
    _states("mamba-cache-mode", FlagKind.TEXT, "none", "Which states the prefix cache keeps."),
    _states("mamba-cache-philox-rounds", FlagKind.INT, 0, "Rounds of the random numbers of rounding.", ge=0),
    _states("mamba-ssm-cache-dtype", FlagKind.TEXT, "auto", "Type of states without those of convolutions."),
    _states("mamba-ssu-algorithm", FlagKind.TEXT, None, "Algorithm of the state's update.", harmless=("auto",)),
    _states("replayssm-buffer-len", FlagKind.INT, 16, "Tokens that ReplaySSM repeats.", ge=1),
    _states("use-replayssm", FlagKind.BOOL, False, "Compute states anew in place of writing each."),
)

ADAPTERS = (
    _adapters("enable-mixed-moe-lora-format", FlagKind.BOOL, False, "Adapters of experts in two formats."),
    _adapters("enable-moe-shared-loras", FlagKind.BOOL, False, "Adapters that experts share."),
    _adapters("enable-tower-connector-lora", FlagKind.BOOL, False, "Adapters of image encoders."),
    _adapters("default-mm-loras", FlagKind.JSON, None, "Adapters by kind of media.", harmless=({},)),
    _adapters("max-lora-cls-labels", FlagKind.INT, None, "Labels of an adapter that classifies.", ge=1),
    _adapters("specialize-active-lora", FlagKind.BOOL, False, "CUDA graphs by number of adapters."),
)

MEDIA = (
    _media("allowed-media-domains", FlagKind.LIST, [], "Hosts that media may be fetched from."),
    _media("disable-chunked-mm-input", FlagKind.BOOL, False, "Never divide an image between two steps."),
    _media("ec-manager-config", FlagKind.JSON, None, "Who keeps the outputs of encoders.", harmless=({},)),
    _media("ec-transfer-config", FlagKind.JSON, None, "Transfers of the outputs of encoders.", harmless=({},)),
    _media("enable-mm-embeds", FlagKind.BOOL, False, "Take embeddings of images."),
    _media("interleave-mm-strings", FlagKind.BOOL, False, "Keep images between texts where they stand."),
    switch(
        "language-model-only",
        "Load no encoders.",
        mapped="only the language model is ever loaded",
    ),
    _media("media-io-kwargs", FlagKind.JSON, None, "Settings of the readers of media.", harmless=({},)),
    _media("mm-device-do-normalize", FlagKind.BOOL, False, "Normalize images on the GPU."),
    _media("mm-encoder-attn-backend", FlagKind.TEXT, None, "Kernels of encoders' attention."),
    _media("mm-encoder-attn-dtype", FlagKind.TEXT, None, "Type of encoders' attention."),
    _media("mm-encoder-fp8-scale-path", FlagKind.TEXT, None, "Scales of encoders' attention."),
    _media("mm-encoder-fp8-scale-save-margin", FlagKind.FLOAT, 1.5, "Margin of scales that are saved."),
    _media("mm-encoder-fp8-scale-save-path", FlagKind.TEXT, None, "Where scales are saved."),
    _media("mm-encoder-only", FlagKind.BOOL, False, "Run encoders alone."),
    _media("mm-encoder-tp-mode", FlagKind.TEXT, "weights", "How several GPUs share an encoder."),
    _media("mm-hasher-algorithm", FlagKind.TEXT, "blake3", "Hash of media."),
    _media("mm-ipc-gpu-memory-gb", FlagKind.FLOAT, 0.0, "GPU memory for decoding media, in GiB.", ge=0),
    _media("mm-processor-cache-gb", FlagKind.FLOAT, 4.0, "Memory of processed media, in GiB.", ge=0, harmless=(0.0,)),
    _media("mm-processor-cache-type", FlagKind.TEXT, "lru", "Kind of that memory."),
    _media("mm-processor-device", FlagKind.TEXT, "auto", "Device that processes media."),
    _media("mm-shm-cache-max-object-size-mb", FlagKind.INT, 128, "Largest processed item, in MiB.", ge=1),
    _media("mm-tensor-ipc", FlagKind.TEXT, "direct_rpc", "How processed media get to workers."),
    switch(
        "skip-mm-profiling",
        "Do not measure encoders at the start.",
        mapped="only the language model is ever loaded",
    ),
    _media("trust-request-mm-kwargs", FlagKind.BOOL, False, "Let requests set how media are processed."),
    _media("video-pruning-method", FlagKind.TEXT, "evs", "How tokens of videos are dropped."),
    _media("video-pruning-rate", FlagKind.FLOAT, None, "Share of tokens of videos that are dropped.", ge=0, le=1),
)

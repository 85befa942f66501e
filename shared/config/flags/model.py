"""Flags of the model, its loading and its tokenizer."""

from blockyard.shared.config.flags.flag import Flag, FlagKind, not_built, switch

_REMOTE_CODE = "no code from model folders is ever run; the supported families are built in"

MODEL = (
    Flag("model", "facebook/opt-125m", "Model folder, hub name, or `demo` for the shipped model."),
    Flag(
        "task",
        "auto",
        "Task of the model; auto: what its architecture and folder are for. One a launch.",
        choices=("auto", "generate", "embedding", "embed", "classify", "score", "reward"),
    ),
    Flag("revision", None, "Branch, tag or commit of the model."),
    Flag("code-revision", None, "Branch, tag or commit of the model's code.", mapped=_REMOTE_CODE),
    Flag(
        "config-format",
        "auto",
        "Format of the model's configuration.",
        choices=("auto", "hf"),
        refused_values={"mistral": not_built("Mistral's params.json; use the folder with config.json")},
    ),
    Flag(
        "max-model-len",
        None,
        "Context length in tokens, prompt plus output; unset: the model's; auto or -1: limited to what memory holds.",
        ge=1,
        named_values={"auto": "auto", "-1": "auto"},
        kind=FlagKind.SIZE,
    ),
    Flag(
        "rope-scaling",
        None,
        'RoPE scaling, e.g. {"rope_type": "dynamic", "factor": 2.0}; where layers differ, of full attention.',
        kind=FlagKind.JSON,
    ),
    Flag("rope-theta", None, "RoPE base; where layers differ, of full attention.", kind=FlagKind.FLOAT),
    Flag(
        "hf-config-path",
        None,
        "Folder or hub name with the config.json to use in place of the model's.",
    ),
    Flag("hf-overrides", None, "Values that override the model's config.json.", kind=FlagKind.JSON),
    Flag(
        "model-impl",
        "auto",
        "Implementation of the model: transformers runs its class over our attention, linear layers and experts, if a "
        "trial at start shows that the class sees each token of a batch alone; auto does so only for an architecture "
        "that `blockyard models` does not list. FAMILIES.md lists the classes that run.",
        ("worker.model_impl",),
        choices=("auto", "transformers"),
        refused_values={"vllm": "another system's; use auto"},
    ),
    Flag(
        "generation-config",
        None,
        "Source of sampling defaults: auto (the model's generation_config.json), a folder, or vllm: neither, "
        "which is also the default.",
    ),
    Flag("override-generation-config", None, 'Sampling defaults, e.g. {"temperature": 0.7}.', kind=FlagKind.JSON),
    Flag(
        "override-pooler-config",
        None,
        "How a pooling model pools, before what its folder says: pooling_type (CLS, LAST, MEAN, ALL, STEP), "
        "normalize, softmax, step_tag_id, returned_token_ids.",
        other_names=("pooler-config",),
        kind=FlagKind.JSON,
    ),
    switch("disable-sliding-window", "Full attention, with the context capped to the window."),
    Flag(
        "max-logprobs",
        20,
        "Most log-probabilities per position that a request may ask for; -1: the whole vocabulary.",
        ("scheduler.model.max_logprobs",),
        ge=-1,
    ),
    Flag(
        "logprobs-mode",
        "raw_logprobs",
        "What log-probabilities of output tokens are: raw_: before penalties, masks and temperature, processed_: after "
        "them, top_k, top_p and min_p; _logits: logits in their place. Others than raw_logprobs are slower on a GPU.",
        ("worker.logprobs_mode",),
        choices=("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    ),
    Flag(
        "seed",
        0,
        "Seed of dummy weights and of the offline LLM; requests have their own.",
        ("worker.seed",),
        ge=0,
        le=2**63 - 1,
    ),
)

LOADING = (
    Flag("download-dir", None, "Download folder for hub models; unset: the hub's cache."),
    Flag(
        "hf-token",
        None,
        "Token for the hub; without a value that of `hf auth login`. A command line is visible to "
        "others: prefer the environment.",
        const="true",
    ),
    Flag(
        "load-format",
        "auto",
        "Weight files; auto: safetensors, else pt; dummy: random weights, experts are chosen evenly; dummy-skewed: a "
        "tenth of the experts get half of the tokens; bitsandbytes, gguf: as --quantization.",
        ("worker.load_format",),
        choices=("auto", "pt", "safetensors", "dummy", "dummy-skewed", "bitsandbytes", "gguf"),
        refused_values={
            "npcache": not_built("numpy weight caches; safetensors load by mmap without one"),
            "tensorizer": not_built("tensorizer files"),
            "sharded_state": not_built("per-rank weight files"),
            "mistral": not_built("Mistral's consolidated files; use the folder with config.json"),
            "runai_streamer": not_built("streamed loading; safetensors load by mmap"),
        },
    ),
    Flag(
        "safetensors-load-strategy",
        "lazy",
        "How weight files are read. lazy: each weight when it is copied; eager: all files into the page cache first; "
        "prefetch: into the page cache while weights are copied.",
        ("worker.load_strategy",),
        choices=("lazy", "eager", "prefetch"),
        refused_values={"torchao": not_built("weights that torchao wrote")},
    ),
    Flag(
        "safetensors-prefetch-num-threads",
        8,
        "Threads that read files into the page cache.",
        ("worker.prefetch_threads",),
        ge=1,
        le=256,
    ),
    Flag(
        "safetensors-prefetch-block-size",
        16 * 2**20,
        "Bytes that such a thread reads at a time.",
        ("worker.prefetch_block_bytes",),
        ge=4096,
        kind=FlagKind.SIZE,
    ),
    Flag(
        "use-tqdm-on-load",
        True,
        "`serve` on a terminal: show progress bars while it starts; off: lines.",
    ),
    Flag(
        "model-loader-extra-config",
        None,
        "Settings of a weight loader.",
        refused=not_built("weight loaders with settings of their own"),
        harmless=({},),
        kind=FlagKind.JSON,
    ),
    Flag(
        "ignore-patterns",
        ["original/**/*"],
        "File patterns that are neither downloaded nor loaded.",
        ("worker.ignore_patterns",),
    ),
    Flag(
        "max-parallel-loading-workers",
        None,
        "Ranks of --tensor-parallel-size that load weights at a time, of all workers of a host; unset: all.",
        ("worker.max_parallel_loading",),
        ge=1,
        kind=FlagKind.INT,
    ),
    Flag(
        "dtype",
        "auto",
        "Type of weights and activations; auto: float32 on CPU, the model's 16-bit type on a GPU.",
        ("worker.dtype",),
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
    ),
    Flag(
        "kv-cache-dtype",
        "auto",
        "Type of the KV cache; auto: the model's; fp8 is fp8_e4m3. 8 bits need a GPU.",
        ("worker.kv_cache_dtype",),
        choices=("auto", "fp8", "fp8_e4m3", "fp8_e5m2"),
    ),
    Flag(
        "quantization-param-path",
        None,
        "JSON file of KV scales; unset: the checkpoint's, or 1.",
        ("worker.kv_scales_path",),
    ),
    switch(
        "calculate-kv-scales",
        "Compute KV scales from the first prompt of a request that has more than one token.",
        ("worker.calculate_kv_scales",),
    ),
)

TOKENIZER = (
    Flag("tokenizer", None, "Tokenizer folder or hub name; unset: --model."),
    Flag(
        "tokenizer-mode",
        "auto",
        "Kind of tokenizer.",
        choices=("auto",),
        refused_values={
            "slow": "tokenizers are read from tokenizer.json alone; use auto",
            "mistral": not_built("Mistral's tekken files; use a folder with tokenizer.json"),
        },
    ),
    Flag("tokenizer-revision", None, "Branch, tag or commit of the tokenizer; unset: --revision."),
    switch(
        "skip-tokenizer-init",
        "Token ids in, token ids out.",
        refused=not_built("serving without a tokenizer; prompts may be given as token ids all the same"),
    ),
    Flag("tokenizers", 1, "Tokenizer processes.", ge=1, le=256),
    Flag(
        "renderer-num-workers",
        1,
        "Threads that render and tokenize prompts.",
        ge=1,
        le=256,
        mapped="the same as --tokenizers",
    ),
    Flag(
        "tokenizer-pool-size",
        None,
        "Tokenizer processes.",
        ge=0,
        le=256,
        mapped="the same as --tokenizers, where 0 means 1",
        kind=FlagKind.INT,
    ),
    Flag(
        "tokenizer-pool-type",
        None,
        "Kind of tokenizer pool.",
        choices=("ray",),
        mapped="the pool is the tokenizer processes of --tokenizers, Ray is not used",
    ),
    Flag(
        "tokenizer-pool-extra-config",
        None,
        "Settings of the tokenizer pool.",
        refused="the pool has no settings besides --tokenizers",
        harmless=({},),
        kind=FlagKind.JSON,
    ),
)

"""Flags of observability, and of features that are not built yet."""

from blockyard.shared.config.flags.flag import Flag, FlagKind, not_built, switch
from blockyard.shared.quantization.table import TABLE, refusals

_SPECULATION = not_built("speculative decoding")
_IMAGES = not_built("image and video input")
_TRACES = not_built("OpenTelemetry traces")

QUANTIZATION = (
    Flag(
        "quantization",
        None,
        "Weight quantization; unset: what the checkpoint says.",
        short_names=("q",),
        choices=tuple(one.name for one in TABLE if not one.refused),
        any_case=True,
        refused_values=refusals(),
    ),
)

LORA = (
    switch("enable-lora", "Serve LoRA adapters; --lora-modules implies it."),
    switch("enable-lora-bias", "Adapters may have biases."),
    Flag(
        "lora-modules",
        [],
        "Adapters, each as name=path or JSON with name, path, base_model_name.",
        takes_json=True,
    ),
    Flag("max-loras", 1, "Adapters on the device: those that one step may use.", ge=1),
    Flag("max-lora-rank", 16, "Largest rank of an adapter.", ge=1, le=512),
    Flag(
        "lora-extra-vocab-size",
        256,
        "Rows of embedding and of head that an adapter may replace, and tokens that it may add.",
        ge=0,
    ),
    Flag(
        "lora-dtype",
        "auto",
        "Type of adapters; auto: the model's.",
        choices=("auto", "float16", "bfloat16", "float32"),
    ),
    Flag(
        "long-lora-scaling-factors",
        None,
        "Factors of the context, such as 2,4, that adapters for longer contexts may have.",
    ),
    Flag("max-cpu-loras", None, "Adapters kept in host memory; unset: --max-loras.", ge=1, kind=FlagKind.INT),
    switch(
        "fully-sharded-loras",
        "Ranks of --tensor-parallel-size divide both matrices of an adapter, not only the one that the layer divides.",
    ),
    Flag("qlora-adapter-name-or-path", None, "An adapter, served under this text as its name."),
    Flag(
        "lora-dir",
        None,
        "Folder below which operators, and the first request that names one, find adapters; unset: none are loaded.",
        to=("gateway.lora_dir",),
    ),
    Flag(
        "lora-target-modules",
        [],
        "Last names of the modules that adapters may change, `experts` for those of mixtures; unset: all, but on a GPU "
        "experts only if an adapter of --lora-modules has them.",
    ),
    Flag(
        "lora-max-wait",
        2.0,
        "Seconds that an adapter waits for a place before the least recently used one takes no new requests.",
        ge=0,
    ),
    switch("enable-prompt-adapter", "Serve prompt adapters; --prompt-adapters implies it."),
    Flag("prompt-adapters", [], "Prompt adapters, each as name=path."),
    Flag("max-prompt-adapters", 64, "Prompt adapters that are loaded at a time.", ge=1),
    Flag("max-prompt-adapter-token", 0, "Most virtual tokens of a prompt adapter.", ge=0),
)

SPECULATIVE = (
    Flag("speculative-model", None, "Draft model, or [ngram].", refused=_SPECULATION),
    Flag(
        "speculative-model-quantization",
        None,
        "Quantization of the draft model.",
        choices=tuple(one.name for one in TABLE if not one.refused),
        any_case=True,
        refused_values=refusals(),
        refused=_SPECULATION,
    ),
    Flag(
        "num-speculative-tokens",
        None,
        "Tokens drafted a step.",
        refused=_SPECULATION,
        ge=0,
        harmless=(0,),
        kind=FlagKind.INT,
    ),
    switch("speculative-disable-mqa-scorer", "Score drafts by batch expansion.", refused=_SPECULATION),
    Flag(
        "speculative-draft-tensor-parallel-size",
        None,
        "GPUs of the draft model.",
        short_names=("spec-draft-tp",),
        ge=1,
        refused=_SPECULATION,
        kind=FlagKind.INT,
    ),
    Flag(
        "speculative-max-model-len", None, "Context of the draft model.", refused=_SPECULATION, ge=1, kind=FlagKind.INT
    ),
    Flag(
        "speculative-disable-by-batch-size", None, "No drafts above it.", refused=_SPECULATION, ge=1, kind=FlagKind.INT
    ),
    Flag("ngram-prompt-lookup-max", None, "Longest n-gram looked up.", refused=_SPECULATION, ge=1, kind=FlagKind.INT),
    Flag("ngram-prompt-lookup-min", None, "Shortest n-gram looked up.", refused=_SPECULATION, ge=1, kind=FlagKind.INT),
    Flag(
        "spec-decoding-acceptance-method",
        "rejection_sampler",
        "How drafts are accepted.",
        choices=("rejection_sampler", "typical_acceptance_sampler"),
        refused=_SPECULATION,
    ),
    Flag(
        "typical-acceptance-sampler-posterior-threshold",
        0.09,
        "Threshold of typical acceptance.",
        refused=_SPECULATION,
    ),
    Flag(
        "typical-acceptance-sampler-posterior-alpha",
        0.3,
        "Scale of typical acceptance.",
        refused=_SPECULATION,
    ),
    Flag(
        "disable-logprobs-during-spec-decoding",
        True,
        "No log-probabilities with drafts.",
        refused=_SPECULATION,
    ),
)

MULTIMODAL = (
    Flag("limit-mm-per-prompt", None, "Images and videos a prompt may have.", refused=_IMAGES),
    Flag("mm-processor-kwargs", None, "Settings of the image processor.", refused=_IMAGES, kind=FlagKind.JSON),
    switch("disable-mm-preprocessor-cache", "Do not keep processed images.", refused=_IMAGES),
    Flag(
        "image-input-type",
        None,
        "Kind of image input.",
        choices=("pixel_values", "image_features"),
        refused=_IMAGES,
    ),
    Flag("image-token-id", None, "Id of the image token.", refused=_IMAGES, kind=FlagKind.INT),
    Flag("image-input-shape", None, "Largest image.", refused=_IMAGES),
    Flag("image-feature-size", None, "Tokens of an image.", refused=_IMAGES, kind=FlagKind.INT),
    Flag("image-processor", None, "Image processor.", refused=_IMAGES),
    Flag("image-processor-revision", None, "Revision of the image processor.", refused=_IMAGES),
    switch("disable-image-processor", "Use no image processor.", refused=_IMAGES),
)

OBSERVABILITY = (
    Flag("otlp-traces-endpoint", None, "Endpoint for traces.", refused=_TRACES),
    Flag(
        "collect-detailed-traces",
        None,
        "Parts traced in detail.",
        choices=("model", "worker", "all"),
        refused=_TRACES,
    ),
    switch("disable-log-stats", "Log no periodic statistics.", ("!scheduler.log_stats",)),
    switch("disable-log-requests", "Log no line for a request, at its arrival or its end."),
    switch(
        "enable-log-requests",
        "Log a line when a request arrives: its id, tokens and sampling fields; with --max-log-len its text.",
    ),
    switch(
        "enable-log-outputs",
        "Log the text of each answer at its end, and of streamed ones each event (--enable-log-deltas).",
        ("gateway.log_outputs",),
    ),
    Flag(
        "enable-log-deltas",
        True,
        "With --enable-log-outputs, log the text of each event of a stream.",
        ("gateway.log_deltas",),
    ),
    Flag(
        "max-log-len",
        None,
        "Most characters of a text in a log line, or ids of a prompt of ids. Beside --enable-log-requests it shows "
        "prompts, which are not shown without it; unset: answers of --enable-log-outputs are whole.",
        ("gateway.max_log_len",),
        ge=0,
        kind=FlagKind.INT,
    ),
    Flag(
        "log-config-file",
        None,
        "JSON file of Python's `logging.config.dictConfig` for all processes, whose name is `processName` in formats.",
    ),
    Flag(
        "logging-config",
        {},
        "`pylogging_config_file`, the same as --log-config-file, and `level`, the same as --log-level.",
        kind=FlagKind.JSON,
    ),
)

STRUCTURED = (
    Flag(
        "guided-decoding-backend",
        None,
        "Engine of structured output; auto: guidance, and xgrammar for what that does not take. A request may name "
        "another one.",
        choices=("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer"),
    ),
    Flag(
        "structured-outputs-config",
        None,
        "Defaults of structured output: `backend` (as --guided-decoding-backend), `disable_any_whitespace` (else a run "
        "between two tokens of JSON is at most a blank, or a line break and 20 blanks), "
        "`disable_additional_properties`. Also one key at a time: --structured-outputs-config.backend xgrammar.",
        kind=FlagKind.JSON,
    ),
    Flag(
        "logits-processor-pattern",
        None,
        "Regular expression of the importable names that requests may give in `logits_processors`; the whole name has "
        "to match. Unset: none.",
        ("scheduler.model.logits_processor_pattern",),
    ),
    Flag(
        "logits-processors",
        [],
        "Logits processors of every request: importable names of classes or functions.",
        ("scheduler.model.logits_processors",),
    ),
    switch(
        "enable-auto-tool-choice",
        "Let the model decide in requests with tools whether to call them; needs --tool-call-parser.",
    ),
    Flag(
        "tool-call-parser",
        None,
        "Format in which the model writes tool calls, one of shared/tool_parsers/FAMILIES.md or of a plugin; auto: by "
        "the chat template.",
    ),
    Flag(
        "tool-parser-plugin",
        "",
        "Python file with more formats for --tool-call-parser: shared/tool_parsers/FAMILIES.md says how to write one.",
    ),
    switch(
        "exclude-tools-when-tool-choice-none",
        'Do not show tools to the model in requests with `tool_choice: "none"`.',
        ("scheduler.model.tools.exclude_when_none",),
    ),
    switch(
        "enable-reasoning",
        "Return reasoning apart from content; needs --reasoning-parser.",
        mapped="--reasoning-parser is enough",
    ),
    Flag(
        "reasoning-parser",
        None,
        "Format in which the model writes its reasoning, one of shared/tool_parsers/FAMILIES.md or of a plugin; auto: "
        "by the chat template.",
    ),
    Flag(
        "reasoning-config",
        {},
        "`reasoning_start_str` and `reasoning_end_str`: the texts that begin and end reasoning, for "
        "`thinking_token_budget` and for grammars that begin behind reasoning; unset: those of --reasoning-parser. "
        "`reasoning_parser`: the same as --reasoning-parser.",
        kind=FlagKind.JSON,
    ),
    Flag(
        "reasoning-parser-plugin",
        "",
        "Python file with more formats for --reasoning-parser.",
    ),
)

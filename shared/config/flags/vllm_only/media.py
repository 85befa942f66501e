"""Flags of images, video and audio that only vLLM has."""

from functools import partial

from blockyard.shared.config.flags.flag import Flag, FlagKind, not_built

_media = partial(Flag, refused=not_built("image and video input"))

MEDIA = (
    _media("allowed-media-domains", FlagKind.LIST, [], "Hosts that media may be fetched from."),
    _media("disable-chunked-mm-input", FlagKind.BOOL, False, "Never divide an image between two steps."),
    _media("ec-manager-config", FlagKind.JSON, None, "Who keeps the outputs of encoders.", harmless=({},)),
    _media("ec-transfer-config", FlagKind.JSON, None, "Transfers of the outputs of encoders.", harmless=({},)),
    _media("enable-mm-embeds", FlagKind.BOOL, False, "Take embeddings of images."),
    _media("interleave-mm-strings", FlagKind.BOOL, False, "Keep images between texts where they stand."),
    Flag(
        "language-model-only",
        FlagKind.BOOL,
        False,
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
    Flag(
        "skip-mm-profiling",
        FlagKind.BOOL,
        False,
        "Do not measure encoders at the start.",
        mapped="only the language model is ever loaded",
    ),
    _media("trust-request-mm-kwargs", FlagKind.BOOL, False, "Let requests set how media are processed."),
    _media("video-pruning-method", FlagKind.TEXT, "evs", "How tokens of videos are dropped."),
    _media("video-pruning-rate", FlagKind.FLOAT, None, "Share of tokens of videos that are dropped.", ge=0, le=1),
)

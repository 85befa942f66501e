"""Flags that choose kernels in vLLM. The kernels here are this project's own, chosen by measurement."""

from functools import partial

from blockyard.shared.config.flags.flag import Flag, FlagKind

_PRODUCTS = "kernels of linear layers and experts are measured on this GPU, and the fastest are taken"
_OWN = "there is one implementation, chosen by device and shapes"

_products = partial(Flag, mapped=_PRODUCTS)
_own = partial(Flag, mapped=_OWN)

KERNELS = (
    _own("attention-backend", FlagKind.TEXT, None, "Kernels of attention."),
    _own("attention-config", FlagKind.JSON, None, "Settings of attention.", short_names=("ac",)),
    _own("disable-cascade-attn", FlagKind.BOOL, True, "Read shared prefixes once for each sequence."),
    _products("linear-backend", FlagKind.TEXT, "auto", "Kernels of linear layers."),
    _products("moe-backend", FlagKind.TEXT, "auto", "Kernels of experts."),
    _products("enable-flashinfer-autotune", FlagKind.BOOL, False, "Measure FlashInfer's kernels at the start."),
    _products("kernel-config", FlagKind.JSON, None, "Settings of kernels."),
    _own("ir-op-priority", FlagKind.JSON, None, "Which implementations of operations come first."),
    _own("monokernel", FlagKind.BOOL, False, "Run a whole decode step as one kernel."),
    _own("sparse-indexer-topk-backend", FlagKind.TEXT, "auto", "Kernels that choose tokens of sparse attention."),
    _own("gdn-prefill-backend", FlagKind.TEXT, None, "Kernels of gated delta networks."),
    _own("kda-prefill-backend", FlagKind.TEXT, None, "Kernels of delta attention in prompts."),
    _own("kda-decode-backend", FlagKind.TEXT, None, "Kernels of delta attention in decodes."),
)

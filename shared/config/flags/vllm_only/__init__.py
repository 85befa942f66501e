"""Flags of newer vLLM releases that are refused here, or that another setting or no setting stands for.

Flags of these releases that are honoured are declared in the modules beside this package, in their groups.
"""

from blockyard.shared.config.flags.flag import Flag
from blockyard.shared.config.flags.vllm_only import devices, models, scheduling, serving

GROUPS: dict[str, tuple[Flag, ...]] = {
    "vLLM: API and logs": serving.SERVING,
    "vLLM: models and weights": models.MODELS,
    "vLLM: speculative decoding": models.SPECULATION,
    "vLLM: states of Mamba layers": models.STATES,
    "vLLM: adapters": models.ADAPTERS,
    "vLLM: scheduling and KV memory": scheduling.SCHEDULING,
    "vLLM: several GPUs and hosts": devices.PARALLEL,
    "vLLM: kernels": devices.KERNELS,
    "vLLM: images and video": models.MEDIA,
}

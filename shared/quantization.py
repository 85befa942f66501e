"""The quantization methods of checkpoints that the worker reads."""

from collections.abc import Mapping

from blockyard.shared.errors import ConfigError

METHODS = ("mxfp4",)  # values of `quant_method` in config.json; `gpu_worker.quantization.registry` has their formats


def quantization_method(config: Mapping[str, object]) -> str | None:
    """Returns `quant_method` in quantization_config of config.json. None: weights are not quantized.

    Raises ConfigError for a method that is unknown, or not said.
    """
    said = config.get("quantization_config")
    if not said:
        return None
    method = said.get("quant_method") if isinstance(said, Mapping) else None
    if isinstance(method, str) and method in METHODS:
        return method
    what = "has no quant_method" if method is None else f"has quant_method {method!r}, which is not supported"
    raise ConfigError(
        f"config.json: quantization_config {what}; supported: {', '.join(METHODS)}; without quantization: "
        """--hf-overrides '{"quantization_config": null}'"""
    )

"""Blockyard: LLM inference and serving as small services. Public names are loaded on first use."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockyard.services.launcher.llm import LLM
    from blockyard.shared.outputs import CompletionOutput, RequestOutput
    from blockyard.shared.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "blockyard.services.launcher.llm",
    "CompletionOutput": "blockyard.shared.outputs",
    "RequestOutput": "blockyard.shared.outputs",
    "SamplingParams": "blockyard.shared.sampling_params",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'blockyard' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)

"""Blockyard: LLM inference and serving as small services. Public names are loaded on first use."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockyard.services.launcher.llm import LLM
    from blockyard.services.launcher.offline.arguments import EngineArgs
    from blockyard.services.launcher.offline.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from blockyard.services.launcher.offline.errors import GenerationError
    from blockyard.services.launcher.offline.outputs import (
        CompletionOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
    )
    from blockyard.services.launcher.offline.prompts import TextPrompt, TokensPrompt
    from blockyard.services.launcher.offline.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EngineArgs",
    "GenerationError",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_HOMES = {
    "LLM": "blockyard.services.launcher.llm",
    "BeamSearchOutput": "blockyard.services.launcher.offline.beam_search",
    "BeamSearchParams": "blockyard.services.launcher.offline.beam_search",
    "BeamSearchSequence": "blockyard.services.launcher.offline.beam_search",
    "CompletionOutput": "blockyard.services.launcher.offline.outputs",
    "EngineArgs": "blockyard.services.launcher.offline.arguments",
    "GenerationError": "blockyard.services.launcher.offline.errors",
    "Logprob": "blockyard.services.launcher.offline.outputs",
    "RequestMetrics": "blockyard.services.launcher.offline.outputs",
    "RequestOutput": "blockyard.services.launcher.offline.outputs",
    "SamplingParams": "blockyard.services.launcher.offline.sampling_params",
    "TextPrompt": "blockyard.services.launcher.offline.prompts",
    "TokensPrompt": "blockyard.services.launcher.offline.prompts",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'blockyard' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)

"""Blockyard: LLM inference and serving as small services. Public names are loaded on first use."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockyard.services.launcher.supervision.supervisor import StartFailed
    from blockyard.services.offline.adapters.requests import LoRARequest, PromptAdapterRequest
    from blockyard.services.offline.answers import CompletionToolCall
    from blockyard.services.offline.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from blockyard.services.offline.engine_args import AsyncEngineArgs, EngineArgs
    from blockyard.services.offline.engines.async_engine import AsyncLLM, AsyncLLMEngine
    from blockyard.services.offline.engines.llm_engine import LLMEngine
    from blockyard.services.offline.llm import LLM
    from blockyard.services.offline.outputs import (
        CompletionOutput,
        GenerationError,
        Logprob,
        RequestMetrics,
        RequestOutput,
        RingLost,
    )
    from blockyard.services.offline.pooling.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from blockyard.services.offline.pooling.params import PoolingParams
    from blockyard.services.offline.prompts import TextPrompt, TokensPrompt
    from blockyard.services.offline.sampling_params import GuidedDecodingParams, RequestOutputKind, SamplingParams
    from blockyard.shared.errors import BlockyardError, ConfigError, RequestError
    from blockyard.shared.ring_client.request_fields.engine_fields import RepetitionDetectionParams
    from blockyard.shared.ring_client.request_fields.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "BlockyardError",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "CompletionToolCall",
    "ConfigError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "GenerationError",
    "GuidedDecodingParams",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptAdapterRequest",
    "RepetitionDetectionParams",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RingLost",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StartFailed",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'blockyard' has no attribute {name!r}")
    # services import this package too: they must not load the client of the offline API
    from blockyard.services.launcher.supervision import supervisor  # noqa: PLC0415
    from blockyard.services.offline import (  # noqa: PLC0415
        answers,
        beam_search,
        engine_args,
        llm,
        outputs,
        prompts,
        sampling_params,
    )
    from blockyard.services.offline.adapters import requests as adapter_requests  # noqa: PLC0415
    from blockyard.services.offline.engines import async_engine  # noqa: PLC0415
    from blockyard.services.offline.pooling import outputs as pooling_outputs  # noqa: PLC0415
    from blockyard.services.offline.pooling import params as pooling_params  # noqa: PLC0415
    from blockyard.shared import errors  # noqa: PLC0415

    modules = (
        *(llm, async_engine, outputs, prompts, beam_search, engine_args, sampling_params, answers),
        *(adapter_requests, pooling_outputs, pooling_params, errors, supervisor),
    )
    return next(getattr(module, name) for module in modules if hasattr(module, name))

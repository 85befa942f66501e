"""How requests to a model are read: settings of its deployment, which gateways get with the model's card."""

from typing import Annotated

import msgspec

from blockyard.shared.messages.base import FrameStruct
from blockyard.shared.messages.grammars import GrammarEngine
from blockyard.shared.messages.requests import DEFAULT_SAMPLING, MinP, RepetitionPenalty, Temperature, TopK, TopP


class SamplingDefaults(FrameStruct, frozen=True):
    """Values for sampling parameters that a request leaves out. `max_new_tokens` also caps every request."""

    temperature: Temperature = DEFAULT_SAMPLING.temperature
    top_k: TopK = DEFAULT_SAMPLING.top_k
    top_p: TopP = DEFAULT_SAMPLING.top_p
    min_p: MinP = DEFAULT_SAMPLING.min_p
    repetition_penalty: RepetitionPenalty = DEFAULT_SAMPLING.repetition_penalty
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


class GrammarDefaults(FrameStruct, frozen=True):
    """Structured output of a request that says nothing else."""

    engine: GrammarEngine = GrammarEngine.AUTO
    any_whitespace: bool = True
    additional_properties: bool = True


class ToolDefaults(FrameStruct, frozen=True):
    """Tool calls and reasoning."""

    auto_choice: bool = False  # the model may decide to call tools; needs a parser
    parser: str = ""  # of tool calls; `shared/parser_plugins` finds it
    exclude_when_none: bool = False  # chat templates do not show tools that the request does not let the model call
    reasoning_parser: str = ""
    reasoning_end: str = ""  # the marker that ends reasoning, of the parser's family
    reasoning_start: str = ""  # that begins it; empty: answers begin inside of reasoning
    reasoning_other_ends: list[str] = []  # texts that end it as well, such as that of a tool call


class ModelSettings(FrameStruct, frozen=True):
    """What a model's requests get where they say nothing else, and what they may ask for."""

    defaults: SamplingDefaults = SamplingDefaults()
    grammars: GrammarDefaults = GrammarDefaults()
    tools: ToolDefaults = ToolDefaults()
    max_logprobs: int = 20  # -1: the whole vocabulary
    template_kwargs: bytes = b""  # JSON object: variables of chat templates
    response_role: str = "assistant"
    logits_processors: list[str] = []  # importable by the worker; applied to every request
    logits_processor_pattern: str = ""  # regular expression of the processors that requests may name; empty: none


DEFAULT_SETTINGS = ModelSettings()

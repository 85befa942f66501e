"""`blockyard.LLM`, the offline API: a model to call from Python."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, get_args

from blockyard.services.offline.adapters.loading import AskedAdapters, LoRARequests, PromptAdapterRequests, ask_adapters
from blockyard.services.offline.batch import OfflineRequest
from blockyard.services.offline.beam_search import BeamSearchOutput, BeamSearchParams, beam_output
from blockyard.services.offline.engine_args import EngineArgsBase
from blockyard.services.offline.engines.llm_engine import LLMEngine
from blockyard.services.offline.external_launcher.processes import OneProcess, digest_of
from blockyard.services.offline.operations import RingOperations
from blockyard.services.offline.outputs import GenerationError, RequestOutput
from blockyard.services.offline.pooling.methods import PoolingMethods
from blockyard.services.offline.progress import UseTqdm, check_bar, wait
from blockyard.services.offline.prompts import ChatOptions, Prompt, read_conversations, read_prompts, with_token_ids
from blockyard.services.offline.running_model import Params, Priority, RunningModel
from blockyard.services.offline.sampling_params import SamplingParams
from blockyard.services.offline.tokenizer import LLMTokenizer
from blockyard.shared.config.services.tokenizer import ContentFormat
from blockyard.shared.errors import RequestError


class LLM(RingOperations, PoolingMethods):
    """Runs the services of `blockyard serve` as child processes of this one, without HTTP.

    `model` and the keywords are the flags of `blockyard serve` with `_` for `-`; an unknown or refused one is a
    ConfigError before any process is started. The ring ends with `close`, at the end of a `with` block, or with the
    interpreter. Calls from several threads run concurrently.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **arguments: Any) -> None:
        self._running = RunningModel(model, arguments)
        self._session = self._running.session
        self._engine: LLMEngine | None = None

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgsBase) -> "LLM":
        """Builds an LLM from an EngineArgs."""
        return cls(**engine_args.keywords())

    def generate(
        self,
        prompts: Any = None,
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        priority: Priority = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        prompt_adapter_request: PromptAdapterRequests = None,
    ) -> list[RequestOutput]:
        """Completes prompts: a text, token ids, {"prompt": ...}, {"prompt_token_ids": ...}, or a list of these.

        `prompt_token_ids` are the ids of one prompt or of each; `prompts` are then texts for the outputs.
        `sampling_params` is one for all prompts or one for each; the default is the model's own. `priority` is an
        integer for all or one for each; lower is earlier. `lora_request` is an adapter for all or for each, None for
        the model itself; so is `prompt_adapter_request`, also beside one. `use_tqdm` may be a factory of progress bars.
        Outputs are in the order of the prompts. Raises RequestError, a ValueError, before any prompt runs if one cannot
        be served; raises GenerationError after all prompts have ended if some failed.
        """
        combined = with_token_ids(prompts, prompt_token_ids)
        read, adapters = read_prompts(combined, self._model), (lora_request, prompt_adapter_request)
        return self._run(read, sampling_params, use_tqdm, priority, adapters)

    def chat(  # noqa: PLR0913, PLR0917  # the signature is vLLM's
        self,
        messages: Sequence[Any],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Priority = None,
        prompt_adapter_request: PromptAdapterRequests = None,
    ) -> list[RequestOutput]:
        """Answers one conversation (a list of messages) or a list of conversations. Otherwise like `generate`.

        The chat template shows `tools`, as in requests, and the model decides whether to call them. With a
        `tool_call_parser` or `reasoning_parser` of the LLM the outputs have `tool_calls`, `reasoning` and `content`;
        `text` stays the whole text, with the markers of the formats. Calls of `strict` tools are valid by their schema.
        """
        if chat_template_content_format not in get_args(ContentFormat):
            known = ", ".join(get_args(ContentFormat))
            raise RequestError(
                f"chat_template_content_format must be one of {known}, got {chat_template_content_format!r}",
                "chat_template_content_format",
            )
        options = ChatOptions(
            chat_template,
            add_generation_prompt,
            continue_final_message,
            chat_template_kwargs,
            "" if chat_template_content_format == "auto" else chat_template_content_format,
            tools,
            self._session.formats,
            self._session.settings.grammars,
        )
        read = read_conversations(messages, options, self._model)
        return self._run(read, sampling_params, use_tqdm, priority, (lora_request, prompt_adapter_request))

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: LoRARequests = None,
        use_tqdm: UseTqdm = False,
        prompt_adapter_request: PromptAdapterRequests = None,
    ) -> list[BeamSearchOutput]:
        """Returns the `beam_width` best sequences of each prompt. Takes the prompts, and raises, as `generate` does."""
        read, adapters = read_prompts(prompts, self._model), (lora_request, prompt_adapter_request)
        outputs = self._run(read, params.sampling(), use_tqdm, None, adapters)
        tokenizer = self.get_tokenizer().backend_tokenizer
        return [beam_output(output, tokenizer) for output in outputs]

    def get_tokenizer(self) -> LLMTokenizer:
        """Returns the model's tokenizer with the interface of transformers: callable, `encode`, `decode` and so on."""
        return self._running.tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters that `generate` uses by default, from --generation-config."""
        return self._running.default_params()

    def close(self) -> None:
        """Ends all processes of the ring. Calls that run in other threads fail. May be called again."""
        self._running.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def llm_engine(self) -> LLMEngine:
        """An engine on this model, for scripts that add requests one by one and drive them by `step`."""
        if self._engine is None:
            self._engine = LLMEngine(self._running)
        return self._engine

    @property
    def _model(self) -> str:
        return self._running.name

    def _run(
        self,
        prompts: list[Prompt],
        params: Params,
        show_bar: UseTqdm,
        priority: Priority,
        adapters: tuple[LoRARequests, PromptAdapterRequests],
    ) -> list[RequestOutput]:
        check_bar(show_bar)
        lora, prompt = adapters
        asked = ask_adapters(lora, len(prompts), prompt)
        requests = self._running.requests(prompts, params, priority)
        processes, content = self._running.processes, b""
        if not isinstance(processes, OneProcess):
            content = digest_of(requests, asked)
        return processes.run("generate", content, lambda: self._run_here(requests, asked, show_bar))

    def _run_here(self, requests: list[OfflineRequest], asked: AskedAdapters, show_bar: UseTqdm) -> list[RequestOutput]:
        pairs = zip(requests, asked.load(self._session), strict=True)
        requests = [replace(one, adapters=own) for one, own in pairs]
        batch, future = self._session.submit(requests)
        try:
            wait(batch.progress, future, len(requests), show_bar)
        finally:
            future.cancel()  # cancels it if waiting was interrupted
        if batch.failures:
            raise GenerationError(batch.failures, batch.outputs)
        return [output for output in batch.outputs if output is not None]

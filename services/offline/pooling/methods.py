"""The methods of `LLM` for pooling models, with vLLM's signatures."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from blockyard.services.offline.pooling import outputs
from blockyard.services.offline.pooling.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from blockyard.services.offline.pooling.params import Params, read_all, truncation_of
from blockyard.services.offline.pooling.pooling_batch import InputGroup, PoolingBatch, PoolingJob
from blockyard.services.offline.progress import UseTqdm, wait
from blockyard.services.offline.prompts import Prompt, read_prompts
from blockyard.services.offline.running_model import RunningModel
from blockyard.shared.errors import RequestError, not_built
from blockyard.shared.messages import ModelCard, PoolingTask
from blockyard.shared.ring_client.pooling import params_check, request_checks
from blockyard.shared.ring_client.pooling.calls import PooledText, PoolingInput
from blockyard.shared.ring_client.pooling.pair_scores import Pairs
from blockyard.shared.token_ids import first_outside, unpack

T = TypeVar("T")
Make = Callable[[str, PooledText, list[int]], T]


class PoolingMethods:
    """Base of LLM. Methods raise RequestError, a ValueError, and without a ring RingLost.

    Prompts are those of `generate`: texts, token ids, {"prompt": ...} or {"prompt_token_ids": ...}, or a list of these.
    `pooling_params` is one for all prompts or one for each. Outputs are in the order of the prompts. A text that is too
    long is an error, unless `truncate_prompt_tokens` cuts it; -1 cuts to the model's length.
    """

    _running: RunningModel

    def encode(
        self,
        prompts: Any,
        pooling_params: Params = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_name: str | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Returns what the model's pooling makes of each prompt, in any shape. `pooling_task` must be the model's."""
        _refuse("lora_request", lora_request)
        request_checks.read_task(pooling_task, self._running.session.card, "pooling_task")
        truncate = truncation_of(truncate_prompt_tokens, tokenization_kwargs)
        task = PoolingTask.ENCODE
        return self._pool(prompts, task, outputs.pooled, pooling_params, truncate, use_tqdm, prompt_name)

    def embed(
        self,
        prompts: Any,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: Params = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Returns a vector for each prompt. `prompt_name`: of the model's texts that go before; "": none goes."""
        _refuse("lora_request", lora_request)
        truncate = truncation_of(truncate_prompt_tokens, tokenization_kwargs)
        task = PoolingTask.EMBED
        return self._pool(prompts, task, outputs.embedded, pooling_params, truncate, use_tqdm, prompt_name)

    def classify(
        self,
        prompts: Any,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: Params = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Returns the probabilities of the model's labels for each prompt."""
        _refuse("lora_request", lora_request)
        truncate = truncation_of(truncate_prompt_tokens, tokenization_kwargs)
        return self._pool(prompts, PoolingTask.CLASSIFY, outputs.classified, pooling_params, truncate, use_tqdm)

    def reward(
        self,
        prompts: Any,
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: Params = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Returns the rewards of each prompt: of the sequence, its tokens or its steps, as the model has them."""
        _refuse("lora_request", lora_request)
        truncate = truncation_of(truncate_prompt_tokens, tokenization_kwargs)
        return self._pool(prompts, PoolingTask.REWARD, outputs.pooled, pooling_params, truncate, use_tqdm)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: Params = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Returns a score for each pair: one text with each of many, or the first with the first, and so on.

        A model that makes vectors compares them by its similarity function. `chat_template` is an argument of the LLM.
        """
        _refuse("lora_request", lora_request)
        _refuse("chat_template", chat_template)
        card = self._running.session.card
        task = params_check.text_card(card, PoolingTask.EMBED, PoolingTask.SCORE).task
        firsts, seconds = _texts(data_1, "data_1"), _texts(data_2, "data_2")
        if len(firsts) not in (1, len(seconds)):
            text = f"data_1 has {len(firsts)} texts and data_2 {len(seconds)}: one goes with many, or each with one"
            raise RequestError(text, "data_2")
        pairs = Pairs(
            firsts=firsts,
            seconds=seconds,
            first_field="data_1",
            second_field="data_2",
            first_is_single=isinstance(data_1, str),
            second_is_single=isinstance(data_2, str),
        )
        truncate = truncation_of(truncate_prompt_tokens, tokenization_kwargs)
        checked = read_all(pooling_params, len(seconds), card, task, truncate)
        job = PoolingJob(
            model=card.names[0],
            groups=[InputGroup(one) for one in checked],
            pairs=pairs,
            compares=task is PoolingTask.EMBED,
        )
        return self._run_job(job, outputs.scored, use_tqdm)

    def _pool(
        self,
        prompts: Any,
        task: PoolingTask,
        make: Make[T],
        params: Params,
        truncate: int | None,
        use_tqdm: UseTqdm,
        prompt_name: str | None = None,
    ) -> list[T]:
        return self._run_job(
            text_job(self._running.session.card, prompts, task, params, truncate, prompt_name), make, use_tqdm
        )

    def _run_job(self, job: PoolingJob, make: Make[T], use_tqdm: UseTqdm) -> list[T]:
        num = len(job.groups)
        batch, future = self._running.session.submit_batch(lambda name, client: PoolingBatch(name, job, client))
        try:
            wait(batch.progress, future, num, use_tqdm, "Pooling")
        finally:
            future.cancel()  # cancels it if waiting was interrupted
        return [make(f"{batch.name}-{i}", item, unpack(item.token_ids)) for i, item in enumerate(batch.items)]


def text_job(
    card: ModelCard,
    prompts: Any,
    task: PoolingTask,
    params: Params,
    truncate: int | None = None,
    prompt_name: str | None = None,
    priority: int = 0,
) -> PoolingJob:
    """The call for these prompts. Raises RequestError."""
    if task in (PoolingTask.EMBED, PoolingTask.CLASSIFY):
        params_check.text_card(card, task)
    else:
        params_check.pooling_card(card, *(() if task is PoolingTask.ENCODE else (task,)))
    read = read_prompts(prompts, card.names[0])
    checked = read_all(params, len(read), card, task, truncate)
    return PoolingJob(
        model=card.names[0],
        groups=[InputGroup(a, p.work.cache_salt) for a, p in zip(checked, read, strict=True)],
        inputs=[_input(prompt, card.vocab_size) for prompt in read],
        is_single=len(read) == 1 and "[" not in read[0].where,
        prompt_name=request_checks.read_prompt_name("prompt_name", prompt_name, card),
        priority=priority,
    )


def _input(prompt: Prompt, vocab_size: int) -> PoolingInput:
    work = prompt.work
    if work.token_ids is None:
        return work.text or ""
    if (outside := first_outside(work.token_ids, vocab_size)) is not None:
        text = f"{prompt.where}: token id {outside} is outside the vocabulary of {vocab_size}"
        raise RequestError(text, prompt.where)
    return work.token_ids


def _texts(given: object, field: str) -> list[str]:
    if isinstance(given, str):
        given, names = [given], [field]
    elif isinstance(given, Sequence) and not isinstance(given, bytes | bytearray):
        names = [f"{field}[{i}]" for i in range(len(given))]
    else:
        raise RequestError(f"{field} is a text or a list of them, got {type(given).__name__}", field)
    if not given:
        raise RequestError(f"`{field}` is empty", field)
    texts = []
    for one, name in zip(given, names, strict=True):
        if not isinstance(one, str):
            raise RequestError(f"{name} must be a text, got {type(one).__name__}", name)
        if not one:
            raise RequestError(f"`{name}` is empty", name)
        texts.append(one)
    return texts


def _refuse(name: str, value: object) -> None:
    if value:
        raise not_built(name)

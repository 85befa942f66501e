"""The methods of `LLM` for pooling models, with vLLM's signatures."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from blockyard.services.offline.pooling import outputs
from blockyard.services.offline.pooling.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from blockyard.services.offline.pooling.params import CheckedPooling, Params, read_all, truncation_of, with_defaults
from blockyard.services.offline.pooling.pooling_batch import InputGroup, Make, PoolingBatch, PoolingJob
from blockyard.services.offline.progress import UseTqdm, wait
from blockyard.services.offline.prompts import Prompt, read_prompts
from blockyard.services.offline.running_model import RunningModel
from blockyard.shared.errors import RequestError, not_built
from blockyard.shared.messages import ModelCard, PoolingTask
from blockyard.shared.ring_client.pooling import params_check, request_checks
from blockyard.shared.ring_client.pooling.calls import PoolingInput
from blockyard.shared.ring_client.pooling.pair_scores import Pairs
from blockyard.shared.token_ids import first_outside, pack

T = TypeVar("T")


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
        """Returns what the model's pooling makes of each prompt, in any shape. `pooling_task` must be the model's; of
        one that makes vectors `token_embed` returns those of all tokens."""
        _refuse("lora_request", lora_request)
        request_checks.read_task(pooling_task, self._running.session.card, "pooling_task")
        pooling_params = with_defaults(pooling_params, task=pooling_task)
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
        instruction: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Returns a score for each pair: one text with each of many, or the first with the first, and so on.

        A model that makes vectors compares them by its similarity function. `chat_template` is an argument of the LLM.
        `instruction` is for a model with a template of pairs, where `pooling_params` have none.
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
        params = with_defaults(pooling_params, instruction=instruction)
        checked = read_all(params, len(seconds), card, task, truncate)
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
        batch, future = self._running.session.submit_batch(lambda name, client: PoolingBatch(name, job, client, make))
        try:
            wait(batch.progress, future, num, use_tqdm, "Pooling")
        finally:
            future.cancel()  # cancels it if waiting was interrupted
        return batch.outputs


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
    plain, is_single = _plain_inputs(prompts, card.vocab_size), False
    if plain is not None:
        inputs, salts = plain, [""] * len(plain)
    else:
        read = read_prompts(prompts, card.names[0])
        inputs, salts = [_input(prompt, card.vocab_size) for prompt in read], [one.work.cache_salt for one in read]
        is_single = len(read) == 1 and "[" not in read[0].where
    checked = read_all(params, len(inputs), card, task, truncate)
    return PoolingJob(
        model=card.names[0],
        groups=_groups(checked, salts),
        inputs=inputs,
        is_single=is_single,
        prompt_name=request_checks.read_prompt_name("prompt_name", prompt_name, card),
        priority=priority,
    )


def _groups(checked: Sequence[CheckedPooling], salts: Sequence[str]) -> list[InputGroup]:
    """Of each input. Those like the first share one object: of many thousands, each would be garbage to collect."""
    first = InputGroup(checked[0], salts[0]) if checked else None
    return [
        first if first is not None and a is first.checked and salt == first.cache_salt else InputGroup(a, salt)
        for a, salt in zip(checked, salts, strict=True)
    ]


def _plain_inputs(prompts: Any, vocab_size: int) -> Sequence[PoolingInput] | None:
    """The inputs of a list of texts, or of lists of ids, which need no reading; None: of others, or one is wrong."""
    kinds = set(map(type, prompts)) if type(prompts) is list else set()
    if kinds not in ({str}, {list}) or not all(prompts):
        return None
    if kinds == {str}:
        return list(prompts)
    try:
        packed = [pack(one) for one in prompts]
    except (OverflowError, TypeError):
        return None
    return packed if first_outside(b"".join(packed), vocab_size) is None else None


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

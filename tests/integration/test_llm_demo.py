"""The demo model through `blockyard.LLM`."""

import math
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from blockyard import LLM, BeamSearchParams, CompletionOutput, RequestOutput, SamplingParams

CODE = "def read_file(path):\n    with open("
GREEDY = SamplingParams(temperature=0, max_tokens=40)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", log_level="error", seed=3, tool_call_parser="hermes") as llm:
        yield llm


@pytest.fixture(scope="module", autouse=True)
def drawn(llm: LLM) -> list[str]:
    """Texts of the first requests of all: how many were before them changes their seeds."""
    return draw(llm)


def first(outputs: list[RequestOutput]) -> CompletionOutput:
    return outputs[0].outputs[0]


def text(llm: LLM, prompt: object, params: SamplingParams) -> str:
    return first(llm.generate(prompt, params, use_tqdm=False)).text


def test_prompts_in_one_call_equal_each_alone(llm: LLM) -> None:
    """Greedy in fp32: equal up to ties, and these prompts have none."""
    prompts = [f"class Stream{i}:\n    def " for i in range(6)]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [o.prompt for o in together] == prompts
    assert [o.outputs[0].text for o in together] == [text(llm, prompt, GREEDY) for prompt in prompts]


def test_choices_that_share_a_prompt_equal_one_alone(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, n=3)
    (output,) = llm.generate(CODE, params, use_tqdm=False)
    assert [choice.text for choice in output.outputs] == [text(llm, CODE, GREEDY)] * 3


def test_ids_and_text_are_the_same_prompt(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(CODE)
    (output,) = llm.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == ids
    assert output.outputs[0].text == text(llm, CODE, GREEDY)
    assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)


def test_chat_renders_the_models_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Write a function that returns the larger of two numbers."}]
    (answer,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert answer.prompt is not None and messages[0]["content"] in answer.prompt
    assert answer.prompt_token_ids == llm.get_tokenizer().encode(answer.prompt, add_special_tokens=False)
    assert text(llm, {"prompt_token_ids": answer.prompt_token_ids}, GREEDY) == answer.outputs[0].text
    (bare,) = llm.chat(messages, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert len(bare.prompt_token_ids) < len(answer.prompt_token_ids)


def test_log_probabilities_of_output_and_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    (output,) = llm.generate(CODE, params, use_tqdm=False)
    choice = output.outputs[0]
    assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids) == 8
    for token_id, position in zip(choice.token_ids, choice.logprobs, strict=True):
        assert len(position) == 3 and position[token_id].rank == 1, "greedy takes the likeliest"
        assert math.fsum(math.exp(one.logprob) for one in position.values()) <= 1 + 1e-5
    sampled = [position[token_id] for token_id, position in zip(choice.token_ids, choice.logprobs, strict=True)]
    assert choice.cumulative_logprob == pytest.approx(sum(one.logprob for one in sampled))
    assert "".join(one.decoded_token or "" for one in sampled) == choice.text
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    for token_id, position_or_none in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert position_or_none is not None and token_id in position_or_none and 2 <= len(position_or_none) <= 3


def test_prompt_logprobs_equal_the_logprobs_of_generation(llm: LLM) -> None:
    """Generated tokens have the same log-probabilities when they are sent as part of a prompt."""
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True)
    (made,) = llm.generate(CODE, params, use_tqdm=False)
    choice = made.outputs[0]
    assert choice.logprobs is not None
    whole = [*made.prompt_token_ids, *choice.token_ids]
    (scored,) = llm.generate([whole], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    assert scored.prompt_logprobs is not None
    tail = scored.prompt_logprobs[len(made.prompt_token_ids) :]
    for token_id, generated, read in zip(choice.token_ids, choice.logprobs, tail, strict=True):
        assert read is not None
        assert read[token_id].logprob == pytest.approx(generated[token_id].logprob, abs=1e-3)


def test_stop_strings_end_the_text(llm: LLM) -> None:
    free = text(llm, CODE, GREEDY)
    stop = free[len(free) // 2 : len(free) // 2 + 3]
    cut = first(llm.generate(CODE, SamplingParams(temperature=0, max_tokens=40, stop=[stop]), use_tqdm=False))
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (free[: free.index(stop)], "stop", stop)
    token_id = first(llm.generate(CODE, GREEDY, use_tqdm=False)).token_ids[5]
    params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[token_id])
    ended = first(llm.generate(CODE, params, use_tqdm=False))
    assert ended.stop_reason == token_id and token_id not in ended.token_ids[:-1]


def test_seeds_make_texts_repeatable_and_choices_differ(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=24, n=3, seed=7)
    (once,) = llm.generate(CODE, params, use_tqdm=False)
    (twice,) = llm.generate(CODE, params, use_tqdm=False)
    assert [c.text for c in once.outputs] == [c.text for c in twice.outputs]
    assert [c.index for c in once.outputs] == [0, 1, 2] and len({c.text for c in once.outputs}) == 3


def draw(llm: LLM) -> list[str]:
    return [o.outputs[0].text for o in llm.generate([CODE] * 6, SamplingParams(max_tokens=20), use_tqdm=False)]


def test_the_llms_own_seed_is_repeatable_too(drawn: list[str]) -> None:
    with LLM("demo", dtype="float32", log_level="error", seed=3, max_num_seqs=4) as other:
        again = draw(other)
    assert drawn == again and len(set(drawn)) == 6


def test_the_models_own_defaults_hold_where_none_are_given(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()
    with LLM("demo", generation_config="auto", worker_cls="mock", log_level="error") as own:
        params = own.get_default_sampling_params()
        assert (params.temperature, params.top_p) != (1.0, 1.0), "as generation_config.json has it"
        assert len(first(own.generate("a", use_tqdm=False)).token_ids) == params.max_tokens


def test_beam_search(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=12, temperature=0.7)  # which has no effect
    by_text, by_ids = llm.beam_search([CODE, {"prompt_token_ids": llm.get_tokenizer().encode(CODE)}], params)
    assert by_text == by_ids
    prompt = llm.get_tokenizer().encode(CODE)
    scores = []
    for found in by_text.sequences:
        assert found.tokens[: len(prompt)] == prompt
        assert all(token in own for token, own in zip(found.tokens[len(prompt) :], found.logprobs, strict=True))
        assert found.text.startswith(CODE)
        assert found.cum_logprob == pytest.approx(
            sum(max(p.values(), key=lambda c: c.logprob).logprob for p in found.logprobs)
        )
        scores.append(found.cum_logprob / (len(prompt) + len(found.logprobs) - (found.finish_reason == "stop")))
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    (plain,) = llm.generate(
        CODE,
        SamplingParams(n=3, use_beam_search=True, early_stopping="vllm", temperature=0, max_tokens=12),
        use_tqdm=False,
    )
    texts = [CODE + choice.text for choice in plain.outputs]
    assert [found.text for found in by_text.sequences] == texts
    ended = llm.beam_search("def f(x):", BeamSearchParams(beam_width=4, max_tokens=8))[0].sequences[0]
    assert (ended.finish_reason, ended.tokens[-1] in ended.logprobs[-1]) == ("stop", True)
    with pytest.raises(ValueError, match="beam_width"):
        llm.beam_search(CODE, BeamSearchParams(beam_width=0, max_tokens=4))


def test_calls_of_a_chat_are_read(llm: LLM) -> None:
    """A grammar makes the demo model write a call."""
    call = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC"}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}]
    messages: list[dict[str, object]] = [{"role": "user", "content": "What time is it?"}]
    params = SamplingParams(max_tokens=80, structured_outputs={"choice": [f"Let me see.{call}"]})
    one = first(llm.chat(messages, params, use_tqdm=False, tools=tools))
    assert (one.text, one.content, one.reasoning) == (f"Let me see.{call}", "Let me see.", None)
    (read,) = one.tool_calls
    assert read.function is not None
    assert (read.function.name, read.function.arguments) == ("get_time", '{"zone": "UTC"}')
    messages += [
        {"role": "assistant", "content": one.content, "tool_calls": [asdict(read)]},
        {"role": "tool", "tool_call_id": read.id, "content": "noon"},
    ]
    (again,) = llm.chat(messages, SamplingParams(max_tokens=2), use_tqdm=False, tools=tools)
    assert again.prompt is not None and '"zone": "UTC"' in again.prompt and "noon" in again.prompt
    plain = first(llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False))
    assert plain.content == plain.text

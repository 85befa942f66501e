"""Requests of the offline API with adapters of both kinds, on a ring with a mock worker."""

from collections.abc import Iterator

import pytest

from blockyard import LLM, BeamSearchParams, LoRARequest, PromptAdapterRequest, RequestError, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, seed=1)
PROMPT, LORA = PromptAdapterRequest("tuned", 1, "/tuned"), LoRARequest("sql", 1, "/sql")
IDS = list(range(20, 40))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    flags = {"enable_lora": True, "enable_prompt_adapter": True, "max_prompt_adapter_token": 8}
    with LLM(worker_cls="mock", max_model_len=64, log_level="warning", **flags) as llm:
        yield llm


def ids(llm: LLM, **requests: object) -> list[int]:
    output = llm.generate({"prompt_token_ids": IDS}, PARAMS, use_tqdm=False, **requests)[0]  # type: ignore[arg-type]
    assert output.prompt_token_ids == IDS
    return list(output.outputs[0].token_ids)


def test_each_call_takes_both_kinds(llm: LLM) -> None:
    """The mock worker's tokens follow from their positions, which virtual tokens move."""
    plain, tuned = ids(llm), ids(llm, prompt_adapter_request=PROMPT)
    assert tuned[:1] == plain[5:6] and ids(llm, lora_request=LORA) == plain
    assert ids(llm, lora_request=LORA, prompt_adapter_request=PROMPT) == tuned
    assert ids(llm, prompt_adapter_request=PromptAdapterRequest("tuned")) == tuned, "it is loaded"
    each = llm.generate(["a", "a"], PARAMS, use_tqdm=False, prompt_adapter_request=[None, PROMPT])
    assert each[0].outputs[0].token_ids != each[1].outputs[0].token_ids
    messages = [{"role": "user", "content": "a"}]
    assert llm.chat(messages, PARAMS, use_tqdm=False, prompt_adapter_request=PROMPT)[0].outputs[0].token_ids
    beams = llm.beam_search(["a"], BeamSearchParams(2, 4), prompt_adapter_request=PROMPT)
    assert len(beams[0].sequences) == 2
    llm.llm_engine.add_request("1", {"prompt_token_ids": IDS}, PARAMS, prompt_adapter_request=PROMPT)
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
    assert outputs[-1].outputs[0].token_ids == tuned


def test_outputs_name_the_lora_request(llm: LLM) -> None:
    asked = [LORA, None, LoRARequest("other", 7, "/other")]
    outputs = llm.generate(["a", "a", "a"], SamplingParams(n=2, max_tokens=2), use_tqdm=False, lora_request=asked)
    assert [output.lora_request for output in outputs] == asked
    assert [[one.lora_request for one in output.outputs] for output in outputs] == [[one] * 2 for one in asked]
    llm.llm_engine.add_request("1", "a", PARAMS, lora_request=LORA)
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            assert output.lora_request == output.outputs[0].lora_request == LORA


def test_an_engine_adds_lists_and_removes_adapters_by_number(llm: LLM) -> None:
    engine, first = llm.llm_engine, LoRARequest("first", 11, "/first")
    assert engine.add_lora(first) and engine.add_lora(first) and engine.add_lora(LoRARequest("second", 12, "/second"))
    with pytest.raises(RequestError, match="adapter 'x': it is broken"):
        engine.add_lora(LoRARequest("x", 13, "/broken"))
    llm.generate("a", PARAMS, use_tqdm=False, prompt_adapter_request=PromptAdapterRequest("tuned", 14, "/tuned"))
    assert {11, 12} <= engine.list_loras() and not {13, 14} & engine.list_loras(), "LoRA adapters that are loaded"
    assert engine.remove_lora(11) and not engine.remove_lora(11) and not engine.remove_lora(14)
    assert 11 not in engine.list_loras() and 12 in engine.list_loras()
    with pytest.raises(RequestError, match="'first' is not loaded, and lora_path is empty"):
        ids(llm, lora_request=LoRARequest("first", 11))
    assert ids(llm, lora_request=first) and 11 in engine.list_loras(), "a request loads it again"
    with pytest.raises(RequestError, match="`pin_lora` is not built yet"):
        engine.pin_lora(12)


def test_virtual_tokens_take_room_of_the_context(llm: LLM) -> None:
    longest = {"prompt_token_ids": [5] * 58}
    assert (
        len(llm.generate(longest, PARAMS, use_tqdm=False, prompt_adapter_request=PROMPT)[0].outputs[0].token_ids) == 1
    )
    with pytest.raises(RequestError, match="maximum context length is 59 tokens"):
        llm.generate({"prompt_token_ids": [5] * 59}, PARAMS, use_tqdm=False, prompt_adapter_request=PROMPT)


def test_what_is_refused_by_name(llm: LLM) -> None:
    for asked, text in (
        ({"prompt_adapter_request": object()}, "prompt_adapter_request must be a PromptAdapterRequest"),
        ({"prompt_adapter_request": [None, None]}, "2 prompt_adapter_requests for 1 prompts"),
        (
            {"prompt_adapter_request": PromptAdapterRequest("no")},
            "'no' is not loaded, and prompt_adapter_local",
        ),
        ({"prompt_adapter_request": PromptAdapterRequest("x", 1, "/broken")}, "adapter 'x': it is broken"),
        ({"lora_request": LoRARequest("tuned")}, "'tuned' is a prompt adapter"),
    ):
        with pytest.raises(RequestError, match=text):
            ids(llm, **asked)
    with pytest.raises(RequestError, match="prompt_adapter_id must be at least 1"):
        PromptAdapterRequest("a", 0)
    with pytest.raises(RequestError, match="prompt_adapter_name is empty"):
        PromptAdapterRequest("")


def test_a_name_is_one_adapter_in_a_call(llm: LLM) -> None:
    """Otherwise the adapter that is loaded last would answer for all of them."""
    prompts = [{"prompt_token_ids": IDS}] * 2
    other = [LORA, LoRARequest("sql", 2, "/other")]
    with pytest.raises(RequestError, match="'sql' is the name of two adapters, /sql and /other"):
        llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=other)
    both = {"lora_request": LoRARequest("tuned", 1, "/tuned"), "prompt_adapter_request": PROMPT}
    with pytest.raises(RequestError, match="'tuned' is the name of a LoRA adapter and of a prompt adapter"):
        llm.generate(prompts, PARAMS, use_tqdm=False, **both)
    same = [LORA, LoRARequest("sql", 2, "/x/../sql")]
    assert len(llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=same)) == 2
    assert ids(llm, lora_request=LoRARequest("sql", 3, "/other")), "another call may replace it"

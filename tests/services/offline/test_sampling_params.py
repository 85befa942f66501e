"""SamplingParams: vLLM's names and defaults, and the same ranges as in HTTP requests."""

import json
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from blockyard import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from blockyard.services.offline.sampling_params import read
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import RepetitionDetection

VOCAB = 1000


def test_defaults_ask_for_nothing_special() -> None:
    params = read(SamplingParams(), VOCAB, 20)
    assert params.sampling == msgspec.structs.replace(params.sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    assert (params.choices.computed, params.max_tokens, params.seed, params.truncate, params.detokenize) == (
        1,
        16,
        None,
        None,
        True,
    )
    assert params.sampling.num_logprobs is None and params.text.stop == []


@pytest.mark.parametrize("top_k", [0, -1, VOCAB, 10**9])
def test_all_of_the_vocabulary_has_several_names(top_k: int) -> None:
    assert read(SamplingParams(top_k=top_k), VOCAB).sampling.top_k == 0


def test_every_field_reaches_a_request() -> None:
    params = SamplingParams(
        n=3,
        best_of=3,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.3,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.05,
        seed=11,
        stop=("END", "STOP"),  # type: ignore[arg-type]
        stop_token_ids=[5],
        bad_words=["no"],
        include_stop_str_in_output=True,
        ignore_eos=True,
        max_tokens=99,
        min_tokens=2,
        logprobs=4,
        prompt_logprobs=0,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        logit_bias={3: 1, 4: -2.5},
        allowed_token_ids=[9, 8, 9],
        truncate_prompt_tokens=64,
    )
    params = read(params, VOCAB, 20)
    sampling, text = params.sampling, params.text
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.1, 0.2, 1.3)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.05)
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.min_tokens) == ([5], True, 2)
    assert (sampling.num_logprobs, sampling.num_prompt_logprobs) == (4, 0)
    assert (sampling.logit_bias, sampling.allowed_token_ids) == ([(3, 1.0), (4, -2.5)], [8, 9])
    assert (text.stop, text.include_stop, text.min_tokens) == (["END", "STOP"], True, 2)
    assert (text.skip_special_tokens, text.spaces_between_special_tokens) == (False, False)
    assert (params.choices.returned, params.seed, params.max_tokens, params.truncate, params.bad_words) == (
        3,
        11,
        99,
        64,
        ["no"],
    )


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty"),
        ({"repetition_penalty": 100.1}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"best_of": 21}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": "x", "detokenize": False}, "stop"),
        ({"bad_words": [""]}, "bad_words"),
        ({"logprobs": -2}, "logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"stop_token_ids": [-5]}, "stop_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"use_beam_search": True, "early_stopping": "often"}, "early_stopping"),
        ({"use_beam_search": True, "n": 65}, "n"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"guided_decoding": {"regex": "a"}, "structured_outputs": {"regex": "a"}}, "guided_decoding"),
        ({"guided_decoding": {"regex": "a"}, "use_beam_search": True}, "guided_decoding.regex"),
        ({"logits_processors": [lambda ids, logits: logits]}, "logits_processors"),
        ({"logits_processors": 5}, "logits_processors"),
        ({"logprob_token_ids": []}, "logprob_token_ids"),
        ({"logprob_token_ids": [-1]}, "logprob_token_ids"),
        ({"logprob_token_ids": [1], "use_beam_search": True}, "logprob_token_ids"),
        ({"repetition_detection": {"max_patern_size": 4}}, "repetition_detection"),
        ({"repetition_detection": {"max_pattern_size": 4}}, "repetition_detection.min_count"),
        (
            {"repetition_detection": {"max_pattern_size": 4, "min_count": 2}, "use_beam_search": True},
            "repetition_detection",
        ),
        ({"extra_args": [1]}, "extra_args"),
        ({"extra_args": {"key": {"nested": 1}}}, "extra_args"),
        ({"extra_args": {"key": "x" * 2**17}}, "extra_args"),
        ({"extra_args": {"kv_transfer_params": 5}}, "extra_args.kv_transfer_params"),
    ],
)
def test_an_invalid_value_is_a_value_error_that_names_its_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    assert caught.value.field == field
    assert isinstance(caught.value, ValueError)


def test_an_unknown_field_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="foo"):
        SamplingParams(foo=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"logprob_token_ids": [VOCAB]}, "logprob_token_ids"),
    ],
)
def test_limits_of_the_model_are_checked_with_it(fields: dict[str, Any], field: str) -> None:
    params = SamplingParams(**fields)
    with pytest.raises(RequestError) as caught:
        read(params, VOCAB, 20)
    assert caught.value.field == field


def test_changed_fields_are_checked_at_use() -> None:
    params = SamplingParams(stop=["a"])
    copy = params.clone()
    params.temperature = -1.0
    params.stop = ["b"]
    with pytest.raises(RequestError, match="temperature"):
        read(params, VOCAB)
    assert read(copy, VOCAB).text.stop == ["a"]


def test_an_importable_processor_is_sent_by_its_name() -> None:
    checked = read(SamplingParams(logits_processors=[json.loads, "own.first"]))
    assert [one.name for one in checked.sampling.logits_processors] == ["json.loads", "own.first"]


def test_listed_tokens_take_the_place_of_the_likeliest() -> None:
    for logprobs in (None, 0, 5):
        checked = read(SamplingParams(logprobs=logprobs, logprob_token_ids=np.array([9, 5, 9])), VOCAB)  # type: ignore[arg-type]
        assert (checked.sampling.logprob_token_ids, checked.sampling.num_logprobs) == ([9, 5], 0)
        assert checked.num_logprobs == 2


def test_repetition_detection_is_for_the_detokenizer() -> None:
    fields = {"max_pattern_size": 6, "min_pattern_size": 2, "min_count": 3}
    for given in (fields, RepetitionDetectionParams(**fields)):
        assert read(SamplingParams(repetition_detection=given)).text.repetition == RepetitionDetection(6, 2, 3)  # type: ignore[arg-type]
    assert read(SamplingParams(repetition_detection=RepetitionDetectionParams())).text.repetition is None


def test_extra_args_are_for_logits_processors_and_the_connector() -> None:
    given = {"bias": np.float64(0.5), "words": ["a", "b"], "kv_transfer_params": {"remote": [{"port": 1}]}}
    params = SamplingParams(extra_args=given)
    for _ in range(2):  # the caller's dict stays as it is
        checked = read(params.clone())
        assert json.loads(checked.sampling.extra_args) == {"bias": 0.5, "words": ["a", "b"]}
        assert json.loads(checked.kv_transfer_params) == {"remote": [{"port": 1}]}
    assert "kv_transfer_params" in given
    empty = read(SamplingParams(extra_args={}))
    assert (empty.sampling.extra_args, empty.kv_transfer_params) == (b"", b"")


def test_positional_arguments_are_in_vllms_order() -> None:
    params = SamplingParams(2, 0.1, 0.2, 1.1, 0.5, 0.9, 7, 0.05, 11, "END", [5], True, 99, 2, 4, 0)
    assert (params.n, params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (
        2,
        0.1,
        0.2,
        1.1,
    )
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.9, 7, 0.05, 11)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == ("END", [5], True)
    assert (params.max_tokens, params.min_tokens, params.logprobs, params.prompt_logprobs) == (99, 2, 4, 0)


def test_from_optional_takes_none_for_defaults() -> None:
    nothing = dict.fromkeys(("n", "presence_penalty", "temperature", "top_p", "stop", "seed", "logprobs", "bad_words"))
    assert SamplingParams.from_optional(**nothing) == SamplingParams()
    params = SamplingParams.from_optional(temperature=0.5, max_tokens=None, logit_bias={"5": 300, 6: -1})
    assert (params.temperature, params.max_tokens, params.logit_bias) == (0.5, None, {5: 100.0, 6: -1.0})
    with pytest.raises(ValueError, match="logit_bias"):
        SamplingParams.from_optional(logit_bias={"word": 1})


def test_numbers_of_numpy() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(7),
        stop_token_ids=np.array([1, 2]),
        allowed_token_ids=[np.int32(3)],
        logit_bias={np.int64(4): np.float64(1.5)},
    )
    assert (params.temperature, params.top_k, params.stop_token_ids) == (0.5, 7, [1, 2])
    assert (params.allowed_token_ids, params.logit_bias) == ([3], {4: 1.5})
    with pytest.raises(RequestError, match="top_k"):
        SamplingParams(top_k=np.float32(1.5))


def test_values_that_stand_for_others() -> None:
    params = SamplingParams(seed=-1, logprobs=True, prompt_logprobs=-1)
    assert (params.seed, params.logprobs) == (None, 1)
    assert read(params, VOCAB, -1).sampling.num_prompt_logprobs == VOCAB
    with pytest.raises(RequestError, match="--max-logprobs is 20"):
        read(params, VOCAB, 20)
    assert SamplingParams(output_kind=RequestOutputKind.DELTA).clone().output_kind is RequestOutputKind.DELTA
    for name, value in {"flat_logprobs": True, "thinking_token_budget": 5}.items():
        with pytest.raises(RequestError, match=f"`{name}` is not built yet"):
            SamplingParams(**{name: value})

"""The declared list of logits steps: every step writes fields of a slot, and each parameter belongs to one step."""

import math

import pytest

from blockyard.kernels.slots.slot_state import NUM_FIELDS, Field
from blockyard.services.gpu_worker.sampling.logits_steps import (
    LOGITS_STEPS,
    SlotFields,
    float_word,
    unsupported_reason,
    write_steps,
)
from blockyard.shared.messages import OutputConstraint, Sampling

# Parameters that change no logits: finish conditions, the seed, and the reported log-probabilities.
OTHERS = {"max_tokens", "ignore_eos", "stop_token_ids", "seed", "num_logprobs", "num_prompt_logprobs"}


def written(sampling: Sampling) -> SlotFields:
    slot = SlotFields([0] * NUM_FIELDS, 10, [2], 100)
    assert write_steps(slot, sampling)
    return slot


def test_every_parameter_belongs_to_one_step() -> None:
    parameters = [name for step in LOGITS_STEPS for name in step.parameters]
    assert sorted([*parameters, *OTHERS]) == sorted(Sampling.__struct_fields__)


def test_the_device_reads_every_parameter() -> None:
    """A value other than the default changes the slot state that is written to the device."""
    changed = {
        "allowed_token_ids": [5],
        "bad_words": [[6]],
        "min_tokens": 3,
        "logit_bias": [(7, 1.5)],
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "temperature": 0.5,
        "min_p": 0.1,
        "top_k": 4,
        "top_p": 0.5,
    }
    default = written(Sampling(max_tokens=5))
    of_host = {"constraint", "logits_processors", "extra_args", "logprob_token_ids"}
    assert {*changed, *of_host} == {name for step in LOGITS_STEPS for name in step.parameters}
    for name, value in changed.items():
        slot = written(Sampling(max_tokens=5, **{name: value}))
        assert (slot.words, slot.edits) != (default.words, default.edits), name
    assert default.words[Field.TOP_K] == 100
    assert default.words[Field.TEMPERATURE] == float_word(1.0)


def test_a_ban_overrides_a_bias() -> None:
    sampling = Sampling(max_tokens=9, bad_words=[[6]], min_tokens=3, logit_bias=[(6, 5.0), (2, 1.0), (2, 0.5)])
    assert written(sampling).edits == {6: (-math.inf, 0), 2: (1.5, 13)}


def test_with_allowed_tokens_other_tokens_need_no_edit() -> None:
    slot = written(Sampling(max_tokens=9, allowed_token_ids=[4, 5], min_tokens=3, logit_bias=[(5, 2.0), (8, 1.0)]))
    assert (slot.only_listed, slot.edits) == (True, {4: (0.0, 0), 5: (2.0, 0)})


def test_a_constraint_without_masks_on_the_device_is_the_hosts_and_has_allowed_tokens_and_min_tokens_in_its_mask() -> (
    None
):
    slot = SlotFields([0] * NUM_FIELDS, 10, [2], 100)
    sampling = Sampling(max_tokens=5, constraint=OutputConstraint(), allowed_token_ids=[4], min_tokens=3)
    assert [[*step.parameters] for step in LOGITS_STEPS if not step.write(slot, sampling)] == [["constraint"]]
    assert (slot.only_listed, slot.edits) == (False, {})
    masked = SlotFields([0] * NUM_FIELDS, 10, [2], 100, mask_owner=7)
    assert write_steps(masked, sampling)


def test_bad_words_of_several_tokens_are_applied_on_the_host() -> None:
    slot = SlotFields([0] * NUM_FIELDS, 10, [2], 100)
    assert not write_steps(slot, Sampling(max_tokens=5, bad_words=[[1], [2, 3]]))
    assert slot.edits == {1: (-math.inf, 0)}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"logit_bias": [(100, 1.0)]}, "token id 100 is outside of the vocabulary of 100"),
        ({"allowed_token_ids": [-1]}, "token id -1 is outside of the vocabulary of 100"),
        ({"repetition_penalty": 0.0}, "repetition_penalty cannot be 0.0"),
        ({"temperature": math.nan}, "temperature cannot be nan"),
        ({"top_p": 0.0}, "top_p cannot be 0.0"),
        ({"presence_penalty": math.inf}, "presence_penalty cannot be inf"),
        ({"bad_words": [[4], [5, 100]]}, "token id 100 is outside of the vocabulary of 100"),
        ({"constraint": OutputConstraint(None, [3, 100])}, "token id 100 is outside of the vocabulary of 100"),
        ({"top_p": 0.5, "allowed_token_ids": [99]}, ""),
    ],
)
def test_invalid_parameters_are_named(fields: dict[str, object], reason: str) -> None:
    assert unsupported_reason(Sampling(max_tokens=5, **fields), 100) == reason

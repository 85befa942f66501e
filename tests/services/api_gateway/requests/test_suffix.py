"""Completions with a text behind the hole: the tokenizer gets both, and how many tokens leave room for the answer."""

from typing import Any

import msgspec
import pytest
from fake_ring import CARD

from blockyard.shared.messages import Generate, Sampling, Tokenize, Tokenized
from blockyard.shared.ring_client.request_fields.finalize_sampling import finalize_sampling

COMPLETION = "/v1/completions"
CONTEXT = CARD.max_model_len


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"max_tokens": 6}, CONTEXT - 6),
        ({}, CONTEXT - 16),
        ({"max_tokens": -1}, CONTEXT // 2),
        ({"max_tokens": 10 * CONTEXT}, CONTEXT // 2),
        ({"max_tokens": 6, "truncate_prompt_tokens": 40}, 40),
        ({"max_tokens": 6, "truncate_prompt_tokens": -1}, CONTEXT - 6),
        ({"max_tokens": 6, "prompt": ""}, CONTEXT - 6),
    ],
)
async def test_the_tokenizer_gets_both_texts(rig, fields: dict[str, Any], most: int) -> None:
    async with rig() as r:
        status, answer = await r.post(COMPLETION, {"prompt": "before", "suffix": "behind", "n": 2} | fields)
        [frame] = r.ring.frames(Tokenize)
    assert status in (200, 400), answer  # the tokenizer of this ring does not know an empty prompt
    assert (frame.text, frame.suffix, frame.max_tokens) == (fields.get("prompt", "before"), "behind", most)


async def test_an_empty_suffix_is_none(rig) -> None:
    async with rig() as r:
        for suffix in ("", None):
            assert (await r.post(COMPLETION, {"prompt": "before", "suffix": suffix}))[0] == 200
        assert all(frame.suffix is None for frame in r.ring.frames(Tokenize)) and len(r.ring.frames(Generate)) == 2


def test_markers_end_the_answer_beside_the_request_s_own_stops() -> None:
    prompt = Tokenized("r", b"\0" * 8, b"", stop_token_ids=[4, 5])
    own = Sampling(max_tokens=3, stop_token_ids=[9])
    made = finalize_sampling(own, prompt, card=CARD, max_tokens=3, seed=1)
    assert made.stop_token_ids == [9, 4, 5]
    plain = msgspec.structs.replace(prompt, stop_token_ids=[])
    assert finalize_sampling(own, plain, card=CARD, max_tokens=3, seed=1).stop_token_ids == [9]

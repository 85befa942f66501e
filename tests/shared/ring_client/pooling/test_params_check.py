"""What a request may ask of a pooling model."""

from typing import Any

import msgspec
import pytest
from fake_pooling import CLASSIFY, EMBED, REWARD
from fake_ring import CARD

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import PoolingCard, PoolingParams
from blockyard.shared.ring_client.pooling.params_check import check_params

JOINED = msgspec.structs.replace(EMBED, pooling="CLS+MEAN", joins_dense=True)
STEPS = msgspec.structs.replace(REWARD, pooling="STEP")


@pytest.mark.parametrize(
    ("card", "asked"),
    [
        (EMBED, {"dimensions": 2, "normalize": False}),
        (EMBED, {"pooling_type": "cls"}),
        (JOINED, {"pooling_type": "all"}),
        (CLASSIFY, {"use_activation": False, "returned_token_ids": [2, 0, 0]}),
        (STEPS, {"step_tag_id": CARD.vocab_size - 1, "returned_token_ids": [1]}),
        (REWARD, {"pooling_type": "step", "step_tag_id": 0}),
    ],
)
def test_what_a_model_can_make(card: PoolingCard, asked: dict[str, Any]) -> None:
    check_params(PoolingParams(**asked), msgspec.structs.replace(CARD, pooling=card))


@pytest.mark.parametrize(
    ("card", "asked"),
    [
        (EMBED, {"dimensions": 3}),
        (EMBED, {"returned_token_ids": [0]}),
        (JOINED, {"pooling_type": "mean"}),
        (CLASSIFY, {"normalize": True}),
        (CLASSIFY, {"returned_token_ids": [3]}),
        (CLASSIFY, {"returned_token_ids": [-1]}),
        (CLASSIFY, {"returned_token_ids": []}),
        (REWARD, {"step_tag_id": 1}),
        (STEPS, {"step_tag_id": CARD.vocab_size}),
        (STEPS, {"step_tag_id": -1}),
    ],
)
def test_what_is_refused_by_name(card: PoolingCard, asked: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        check_params(PoolingParams(**asked), msgspec.structs.replace(CARD, pooling=card))
    assert (caught.value.field, caught.value.status) == (next(iter(asked)), 400)

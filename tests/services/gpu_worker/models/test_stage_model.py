"""What a stage's model returns and sends."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.stage_model import StageModel
from blockyard.services.gpu_worker.parallel.stage_link import StageLink
from blockyard.services.gpu_worker.parallel.stages import Stage
from blockyard.services.gpu_worker.step import Attend, LogitsIndices, Step

HIDDEN, VOCAB = 3, 11


class FirstDecoder:
    """Layers without a head, which do not prune rows."""

    shape = SimpleNamespace(num_outputs=0, vocab_size=VOCAB)
    hidden_size = HIDDEN
    table = adapter_rows = adaptable = None

    def forward(self, step: Step) -> Tensor:
        return torch.arange(float(HIDDEN * len(step.token_ids))).view(-1, HIDDEN)


class SentRows:
    """The link of a first stage."""

    is_first, is_last = True, False

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def send(self, rows: Tensor) -> None:
        self.sent.append(rows)


@pytest.mark.parametrize("num_logits", [None, 2, 8])
def test_a_first_stage_sends_all_rows_and_has_as_many_logits_as_the_last(num_logits: int | None) -> None:
    link = SentRows()
    stage = cast(Stage, SimpleNamespace(layers=range(1), is_last=False))
    model = StageModel(cast(Decoder, FirstDecoder()), stage, cast(StageLink, link))
    ids, rows = torch.arange(5), torch.arange(num_logits or 0)
    indices = None if num_logits is None else LogitsIndices(rows, rows, rows)
    hidden = model.forward(Step(ids, ids, cast(Attend, None), indices))
    assert [len(one) for one in link.sent] == [5]
    assert model.logits(hidden).shape == (5 if num_logits is None else num_logits, VOCAB)

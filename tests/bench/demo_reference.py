"""Whether rounding explains an answer of the demo model: a float64 reference scores every token of it.

Without `--batch-invariant` two right answers can part where two tokens score the same up to rounding: see
tests/support/ties.py.
"""

import torch
from several_choices import Answer, Body
from ties import ROUNDING
from torch import Tensor
from transformers import AutoModelForCausalLM

from blockyard.kernels.sampling.philox_gumbel import gumbel_rows, split_seed
from blockyard.services.launcher.models.model_files import demo_folder

BOUND = ROUNDING[torch.float32]  # of the largest score


class Reference:
    def __init__(self) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float64)

    def explains(self, body: Body, expected: Answer, got: Answer) -> bool:
        """Whether each choice follows the reference's scores, but for ties."""
        if len(got) != len(expected) or any(len(a) != len(b) for a, b in zip(expected, got, strict=True)):
            return False
        if body.get("use_beam_search"):
            pairs = zip(expected, got, strict=True)
            return all(abs(self._total(body, a) - self._total(body, b)) <= BOUND * len(a) * 100 for a, b in pairs)
        if width := body.get("best_of"):  # ordered by their score, not by their index
            return all(any(self._follows(body, ids, i) for i in range(width)) for ids in got)
        return all(self._follows(body, ids, i) for i, ids in enumerate(got))

    def _scores(self, body: Body, ids: list[int]) -> Tensor:
        """[len(ids), vocabulary]"""
        with torch.no_grad():
            return self._model(torch.tensor([body["prompt"] + ids])).logits[0, len(body["prompt"]) - 1 : -1]

    def _follows(self, body: Body, ids: list[int], choice: int) -> bool:
        scores, first = self._scores(body, ids), len(body["prompt"])
        if body["temperature"]:
            key = torch.tensor(split_seed(body["seed"]))[:, None].expand(2, len(ids))
            places = torch.arange(first, first + len(ids))
            noise = gumbel_rows(key, places, torch.full((len(ids),), choice), scores.shape[1])
            scores = scores / body["temperature"] + noise.double()
        taken = scores.gather(1, torch.tensor(ids)[:, None])[:, 0]
        return bool((scores.max(1).values - taken <= BOUND * scores.abs().max(1).values).all())

    def _total(self, body: Body, ids: list[int]) -> float:
        scores = self._scores(body, ids).log_softmax(-1)
        return float(scores.gather(1, torch.tensor(ids)[:, None]).sum())

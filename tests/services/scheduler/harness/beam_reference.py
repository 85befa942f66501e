"""A beam search on the mock worker's log-probabilities, without a scheduler."""

from array import array
from zlib import crc32

import msgspec

from blockyard.services.gpu_worker.mock.adapters import VIRTUAL_TOKENS
from blockyard.services.gpu_worker.mock.batch import Pattern, likeliest
from blockyard.services.scheduler.sequences.beam_search import BeamSearch, Finished, Hypothesis
from blockyard.shared.messages import Generate
from blockyard.shared.token_ids import virtual_ids

from .fakes import ids_list


def known_prompt(frame: Generate) -> list[int]:
    """The prompt behind the virtual tokens of its adapter."""
    return ids_list(virtual_ids(VIRTUAL_TOKENS if frame.prompt_adapter else 0) + frame.prompt_ids)


def beam_reference(frame: Generate, pattern: Pattern, eos: list[int], max_model_len: int) -> list[Finished]:
    assert frame.beam is not None
    prompt = known_prompt(frame)
    steps = BeamSearch(frame.beam, frame.sampling, len(prompt))
    steps.shorten(max_model_len - len(prompt))
    asked = msgspec.structs.replace(frame.sampling, ignore_eos=True)
    num = max(steps.num_candidates(eos), frame.sampling.num_logprobs or 0)
    live = [Hypothesis(array("I"))]
    while live:
        for hypothesis in live:
            ids = prompt + hypothesis.outputs.tolist()
            token = pattern.token(asked, 0, len(ids), array("I", prompt), eos)
            hypothesis.top = likeliest(token, num, crc32(array("I", ids)))
        live = [hypothesis for _, hypothesis in steps.step(live, eos)]
    return steps.finished

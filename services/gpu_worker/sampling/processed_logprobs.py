"""Log-probabilities of the distribution that a token is drawn from: --logprobs-mode processed_logprobs."""

import torch
from torch import Tensor

from blockyard.services.gpu_worker.sampling.topk_topp_sampler import SamplingLimits

LEAST = -9999.0  # of a token that cannot be drawn: JSON has no infinity


def processed(logits: Tensor, temperature: Tensor, limits: SamplingLimits, as_logits: bool) -> Tensor:
    """logits [rows, vocab] behind penalties and masks, temperature [rows] -> values [rows, vocab].

    Tokens outside of min-p, then top-k, then top-p of the remaining probability have LEAST, as in `sample_limited`.
    as_logits: the values are scaled logits in place of log-probabilities.
    """
    scaled = logits / temperature[:, None]
    ordered, order = scaled.log_softmax(-1).sort(-1, descending=True)
    kth = ordered.gather(1, limits.top_k.clamp(max=ordered.shape[1])[:, None] - 1)
    kept = (ordered >= ordered[:, :1] + limits.min_p.log()[:, None]) & (ordered >= kth)
    shares = ordered.exp().masked_fill_(~kept, 0.0)
    top_p = limits.top_p[:, None]
    kept &= (shares.cumsum(-1) - shares < top_p * shares.sum(-1, keepdim=True)) | (top_p >= 1)
    kept[:, 0] = True
    inside = torch.zeros_like(kept).scatter_(1, order, kept)
    values = scaled.masked_fill(~inside, float("-inf"))
    return (values if as_logits else values.log_softmax(-1)).clamp_(min=LEAST)

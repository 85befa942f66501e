"""Log-probabilities of the raw logits, before temperature, penalties, masks and truncation.

vLLM reports them by default (`logprobs_mode=raw_logprobs`). They are comparable across sampling parameters.
"""

import torch
from torch import Tensor

from blockyard.shared.messages import TokenLogprobs


def score(logprobs: Tensor, token_ids: Tensor, num_top: int) -> list[TokenLogprobs]:
    """One entry for each row of logprobs [rows, vocab]: its token and the `num_top` likeliest. Ranks start at 1."""
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(-1).add_(1)
    top = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1) if num_top else None
    columns = zip(token_ids.tolist(), chosen[:, 0].tolist(), ranks.tolist(), strict=True)
    if top is None:
        return [TokenLogprobs(token, value, rank, [], []) for token, value, rank in columns]
    rows = zip(columns, top.indices.tolist(), top.values.tolist(), strict=True)
    return [TokenLogprobs(token, value, rank, ids, values) for (token, value, rank), ids, values in rows]


def score_listed(logprobs: Tensor, token_id: int, listed: list[int]) -> TokenLogprobs:
    """The entry of one row of logprobs [vocab]: its token, and these candidates in their order."""
    chosen = logprobs[token_id]
    values = logprobs[torch.tensor(listed, device=logprobs.device)].tolist()
    return TokenLogprobs(token_id, float(chosen), int((logprobs > chosen).sum()) + 1, listed, values)

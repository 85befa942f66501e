"""Log-probabilities of the raw logits, before temperature, penalties, masks and truncation.

vLLM reports them by default (`logprobs_mode=raw_logprobs`). They are comparable across sampling parameters.
"""

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

"""Log-probabilities as clients see them: of the raw logits, before temperature, penalties, masks and truncation.

That is what vLLM reports by default (`logprobs_mode=raw_logprobs`), and what compares across sampling settings.
"""

from torch import Tensor

from blockyard.shared.messages import TokenLogprobs


def score(logprobs: Tensor, token_ids: Tensor, num_top: int) -> list[TokenLogprobs]:
    """One entry a row of logprobs [rows, vocab]: its token's, and the `num_top` likeliest. Rank 1 is the likeliest."""
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(-1).add_(1)
    top = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1) if num_top else None
    columns = zip(token_ids.tolist(), chosen[:, 0].tolist(), ranks.tolist(), strict=True)
    if top is None:
        return [TokenLogprobs(token, value, rank, [], []) for token, value, rank in columns]
    rows = zip(columns, top.indices.tolist(), top.values.tolist(), strict=True)
    return [TokenLogprobs(token, value, rank, ids, values) for (token, value, rank), ids, values in rows]

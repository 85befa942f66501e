"""TokenSteps from the rows and steps of token batches, as a detokenizer reads them."""

from blockyard.shared.messages import NO_LOGPROBS, StreamOpen, TokenBatch, TokenStep, decode_logprobs
from blockyard.shared.token_ids import unpack


def steps_of(batch: TokenBatch, streams: dict[int, StreamOpen]) -> list[TokenStep]:
    """All tokens of a batch as steps, in order. `streams` holds the open streams by number."""
    for opened in batch.opens:
        assert opened.stream not in streams, "two streams are called the same"
        streams[opened.stream] = opened
    steps: list[TokenStep] = []
    for rows in batch.rows:
        columns = map(unpack, (rows.streams, rows.firsts, rows.token_ids))
        encoded = rows.logprobs or [NO_LOGPROBS] * (len(rows.streams) // 4)
        for number, first, token_id, one in zip(*columns, encoded, strict=True):
            logprobs = decode_logprobs(one)
            opened = streams[number]
            name = (opened.request_id, opened.attempt, opened.choice, first)
            steps.append(TokenStep(*name, [token_id], logprobs=[] if logprobs is None else [logprobs]))
    return steps + batch.steps

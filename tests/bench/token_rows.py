"""What a detokenizer reads from batches of tokens, told in steps."""

from blockyard.shared.messages import StreamOpen, TokenBatch, TokenStep
from blockyard.shared.token_ids import unpack


def steps_of(batch: TokenBatch, streams: dict[int, StreamOpen]) -> list[TokenStep]:
    """All that a batch says of tokens, in its order. `streams`: those that earlier ones opened, by number."""
    for opened in batch.opens:
        assert opened.stream not in streams, "two streams are called the same"
        streams[opened.stream] = opened
    steps: list[TokenStep] = []
    for rows in batch.rows:
        columns = map(unpack, (rows.streams, rows.firsts, rows.token_ids))
        for number, first, token_id in zip(*columns, strict=True):
            opened = streams[number]
            steps.append(TokenStep(opened.request_id, opened.attempt, opened.choice, first, [token_id]))
    return steps + batch.steps

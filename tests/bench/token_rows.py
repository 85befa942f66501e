"""TokenSteps from the rows and steps of token batches, as a detokenizer reads them."""

from blockyard.shared.messages import StreamOpen, TokenBatch, TokenStep
from blockyard.shared.token_ids import unpack


def steps_of(batch: TokenBatch, streams: dict[int, StreamOpen]) -> list[TokenStep]:
    """All tokens of a batch as steps, in order. `streams` holds the open streams by number."""
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

"""Log-probabilities with the bytes of their tokens."""

from collections.abc import Sequence

from blockyard.services.detokenizer.token_table import TokenTable
from blockyard.shared.messages import TextLogprobs, TokenLogprobs


def with_tokens(entries: Sequence[TokenLogprobs], table: TokenTable, as_ids: bool) -> list[TextLogprobs]:
    """Raises UnknownToken."""
    name = _id_name if as_ids else table.raw
    return [
        TextLogprobs(
            entry.token_id,
            name(entry.token_id),
            entry.logprob,
            entry.rank,
            entry.top_ids,
            [name(token_id) for token_id in entry.top_ids],
            entry.top_logprobs,
        )
        for entry in entries
    ]


def _id_name(token_id: int) -> bytes:
    return b"token_id:%d" % token_id

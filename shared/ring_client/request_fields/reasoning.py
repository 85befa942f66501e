"""Reads `thinking_token_budget`: how many tokens a model may think before its answer."""

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import ToolDefaults
from blockyard.shared.ring_client.request_fields import limits

FIELD = "thinking_token_budget"


def read_thinking_budget(value: int | None, defaults: ToolDefaults) -> int | None:
    """Most tokens of reasoning; None: no limit. -1 is no limit, too, as in vLLM. Raises RequestError."""
    if value is None or value == -1:
        return None
    budget = min(limits.integer(FIELD, value, 0, 0), limits.MOST_TOKENS)
    if not defaults.reasoning_end:
        raise RequestError(f"{FIELD} needs a server with --reasoning-parser, which knows where reasoning ends", FIELD)
    return budget

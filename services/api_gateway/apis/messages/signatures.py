"""The `signature` of a thinking block."""

from blockyard.services.api_gateway.apis.hidden_reasoning import read_hidden_reasoning

SHOWN = "blockyard"  # of thinking that the block itself has


def hidden_thinking(signature: str) -> str:
    """The text in a signature or in the data of a redacted block; empty if that is damaged or of another server."""
    try:
        return read_hidden_reasoning(signature) or ""
    except ValueError:
        return ""

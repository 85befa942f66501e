"""The `signature` of a thinking block: an opaque text, which brings thinking back that was not shown.

Clients send the blocks of earlier answers back as they came, and the chat template shows the model its thinking.
"""

import base64
import binascii

SHOWN = "blockyard"  # of thinking that the block itself has
HIDDEN = "blockyard."  # and behind it the text


def hidden_signature(thinking: str) -> str:
    return HIDDEN + base64.urlsafe_b64encode(thinking.encode()).decode("ascii")


def hidden_thinking(signature: str) -> str:
    """The text in a signature or in the data of a redacted block; empty if that is not of this server."""
    if not signature.startswith(HIDDEN):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(HIDDEN), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return ""

"""An opaque text that brings reasoning back which a client was not shown.

Clients send the items and blocks of earlier answers back as they came, and the chat template shows the model its
reasoning. It is `encrypted_content` in /v1/responses and the `signature` of a thinking block in /v1/messages.
"""

import base64
import binascii

HIDDEN = "blockyard."  # and behind it the text


def hide_reasoning(reasoning: str) -> str:
    return HIDDEN + base64.urlsafe_b64encode(reasoning.encode()).decode("ascii")


def read_hidden_reasoning(text: str) -> str | None:
    """The reasoning in `text`; None for a text of another server. Raises ValueError if it is damaged."""
    if not text.startswith(HIDDEN):
        return None
    try:
        return base64.b64decode(text.removeprefix(HIDDEN), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as e:
        raise ValueError("the hidden reasoning is damaged") from e

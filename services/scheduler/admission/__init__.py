"""The answers to new requests: Refused, or Accepted with the detokenizer that writes the text.

The core calls `RequestHandler` for each frame of a gateway. A request passes `ModelLimits` (can this model run it?) and
the bounds of the queue (does it fit?), and its sequences wait. `Acceptance` answers it when it is first scheduled or
has waited for a while.

Imports `sequences`, `batch`, `queue` and `lifecycle`.
"""

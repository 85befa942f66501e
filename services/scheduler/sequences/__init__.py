"""Requests, their sequences, and the state of a sequence in a running batch. Data with methods, no decisions.

A `Request` has one `Sequence` for each choice, or for each beam of a beam search. While a sequence is in a running
batch, its slot, its `BlockTable` and its progress are in a `RunningSequence`. A field that one part alone
writes is written there.

- `requests`: these types.
- `pooled_requests`, `packed_texts`: requests with many prompts, and their texts where a model has no KV.
- `beam_search`: the algorithm of beam search, on hypotheses.
- `transfer_params`: what a client asks of a request's KV transfer.

Used by all other folders. Imports only `outbox`, `plan_pacer` and shared code.
"""

"""Requests, their sequences, and the text streams of their choices.

A `Request` has one `Sequence` for each choice, or for each beam of a beam search. While a sequence is in a running
batch, its slot, blocks and progress are in a `RunningSequence`. Their fields are written by their own methods.

- `requests`: these types. `parallel_sampling`: sequences of one request compute their prompt once.
- `beam_search`: the algorithm. `beam_sequences`: runs it with sequences of the batch.
- `detokenizer_streams`: which detokenizer writes the text of a request.

Called by queue, batch and lifecycle. `requests` imports only kv_cache's block table and the outbox.
"""

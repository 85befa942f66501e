"""Live requests: how their sequences start to wait, wait again after a preemption, and end.

- `lifecycle`: owns the live requests and the waiting queue; how a sequence leaves the batch or the queue.
- `parallel_sampling`: sequences of one request compute their prompt once.
- `beam_sequences`: beam search, with a sequence for each beam.
- `detokenizer_streams`: which detokenizer writes the text of a request.

Called by `admission`, `workers` and `planning`. Imports `sequences`, `kv_cache`, `batch`,
`queue` and `transfers`.
"""

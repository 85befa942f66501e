"""Requests for vectors, scores or classes: many texts in one call.

- `calls`: `PoolingCall`, what a client asks, and `PooledAnswer`, what it gets.
- `pooling_client.PoolingClient`: `RingClient.pooling`; `pool(call)` is all that gateways and `LLM` need.

Imports go to the tokenizer client, the journal and recovery.
"""

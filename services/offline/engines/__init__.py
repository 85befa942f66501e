"""Engines with vLLM's interface, for scripts that add requests one by one.

The caller of `LLMEngine` adds requests and calls `step` in a loop; `AsyncLLMEngine` returns an async iterator for each
request, and has vLLM's other methods from `AsyncOperations`. Both run their requests as `LiveRequest`s in the ring of a
`RunningModel`, and the second one texts for pooling models as `LivePooling`s.

Imports: the modules of `offline` except `llm`, which imports this package.
"""

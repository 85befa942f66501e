"""`LLM.embed`, `encode`, `score`, `classify` and `reward`: texts to vectors, scores and classes.

- `params`: `PoolingParams` with vLLM's fields, and their check.
- `outputs`: vLLM's classes of outputs; `data` is a numpy array.
- `pooling_batch.PoolingBatch`: one call, which asks the ring for some thousands of texts at a time.
- `methods.PoolingMethods`: the methods, a base of `LLM`.

Imports go to `prompts`, `running_model` and `progress` of the folder above; `llm` imports this.
"""

"""Dense families with checkpoints that name weights as Llama's do: `llama.build_llama` with a `LlamaVariant` each."""

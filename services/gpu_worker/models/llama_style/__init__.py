"""Dense families whose checkpoints name their weights as Llama's do: `llama.build_llama` with a `LlamaVariant` each."""

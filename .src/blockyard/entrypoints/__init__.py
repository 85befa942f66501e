"""vLLM's module paths of programs that are started with `python -m`."""

"""Prompt adapters of a worker: vectors that are the input of a prompt's first tokens, in place of embeddings.

- `lora.read_prompt` reads a PEFT folder of prompt tuning or P-tuning, in the process of `lora.reader_process`.
- `prompt_vectors.PromptVectors` has the vectors in host memory. `Batch` tells it which slots begin with them, and the
  steps ask it for the input vectors of their tokens.
- `adapter_hosts.AdapterHosts` passes what the scheduler asks for to it and to `lora.worker_adapters`.

With several ranks the leader alone has the vectors, and sends those of a step with it: ranks put them in place of the
embeddings that they have summed, and pipeline stages behind the first do not read them.

The virtual tokens are the first tokens of a sequence for all other parts of the worker: they have positions, blocks and
an id that means nothing. Imports `lora`, `slots` and `step`. `engine` and `batch` call it.
"""

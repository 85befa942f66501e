"""LoRA adapters of a worker: their folders, their matrices in host memory, their places, and their products.

- `adapter_files` reads a PEFT folder, its weights into a `file_memory.FileMemory`; `module_tensors` assigns its tensors
  to modules.
- `targets.ModelTargets` finds the layers of these modules, and brings B into the order of the layers' outputs.
- `read_prompt` reads a folder of a prompt adapter, for `prompt_adapters`.
- `read_modules` does the first in a child process (`reader_process`; `reader_client` is the worker's end), and
  `worker_adapters` the second in pieces between steps, which gives a `HostAdapter`. On a device the second is done once
  for adapters of one form: threads copy the others out of the reader's memory.
- `places.AdapterPlaces` adapts a model's layers (`Linear.adapt`, `UpProjection.adapt`) and holds an
  adapter in each of its places.
- `device`: places in the memory of a device, and the products there.
- `token_rows`: what it changes of embedding and head beside that.
- `ranks`: which part of an adapter a rank of several has, and how all ranks load and place the same ones.
- `cpu_products` adds the products of adapters on the CPU, `cpu_head_products` those of latent attention,
  `cpu_token_products` those of embedding and head.

Which row of a step has which place is said by `layers.adapter_rows.AdapterRows`, one object of each model: the steps
write it, the layers' products read it. A step of which no row has an adapter runs as if there were none.

How another layer takes an adapter's rows: the docstring of `layers`.

Imports `layers`, `loading` and `kernels`. `engine` and `runner` call it.
"""

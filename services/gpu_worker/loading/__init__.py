"""Reads a model folder: config.json and the weights. Also frees and restores weights for sleep mode.

- `weights.WeightTable`: where each tensor of the checkpoint goes. Layers declare their weights in it.
- `tensor_groups`: tensors that are converted together, such as codes and scales, once all of them are read.
- `tensor_headers`: shapes and dtypes of a quantized checkpoint's tensors, which the table has before they are read.
- `linear_spec`: the parts of a layer's matrices, and which rows or columns of them a rank has.
- `hf_config`: reads config.json and generation_config.json.
- `checkpoint.load` fills the table from safetensors or torch files, on a GPU with the threads of `parallel_load`.
- `gguf_file` reads .gguf files by the names of transformers.
- `checkpoint_check`: compares names, shapes, dtypes and free memory with the checkpoint before memory is allocated.
- `sleep.SleepingRunner`: a runner with sleep mode. `weight_offload` moves weights to host memory for it.

`engine`, `runner` and `__main__` call this folder; `layers/`, `models/` and `kv/` declare weights in its table. It is
below all other folders: it imports only `interfaces`, `memory` and `host_link`.
"""

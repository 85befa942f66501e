"""Steps on a GPU, launched ahead of the host, as CUDA graphs where one fits.

- `cuda_steps.CudaSteps` launches a step. Its words pass through the buffers of `execution.pinned_ring`.
- `device_ops`: the operations of a step besides the model, which are kernels.
- `device_masks` lets the device read the masks of structured output.
- `decode_graphs.DecodeSteps`: steps of one token a sequence, as CUDA graphs.
- `graph_pool.GraphPool` captures graphs that share their memory.
- `prefill_steps` builds steps with prefills, `prefill_graphs` captures them, and `prefill_sizes` decides which sizes.
- `stored_layers` tells which layers of a step with prefill have stored K and V, for the sends of KV blocks.
- `forward_capture` captures steps that pool, `chunk_graphs` has the graphs of decoders, `pooled_attention` the
  attention of eager steps.
- `prefill_kernels` compiles prefill attention before the first step.

`engine` and `compilation/` call this folder. It imports `execution/`, `attention/`, `linear_tuning/` and the kernels.
"""

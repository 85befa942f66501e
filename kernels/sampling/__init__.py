"""From logits to tokens on the device, for CUDA graphs.

- `sampling_state`: the tensors that the kernels read and write. `sampling_references`: the kernels in plain torch.
  Neither imports Triton.
- `penalize_logits`: masks, bias, bans and penalties, for the slots that need them (`LogitsEdits`).
- `wait_for_masks`: masks of structured output, which another process writes (`MaskTensors`), and `publish_sampled`,
  which tells that process the tokens.
- `sample_tokens`: one token a row (`SamplingTensors`). Its kernels are in `sample_scan`, `sample_select` and
  `sample_large_nucleus`; `sample_common`, `sample_small_nucleus` and `sample_fallback` are device functions of these.
- `logprobs`: log-probabilities and ranks (`LogprobsTensors`).
- `copy_logits`: logits of the rows that the host samples.
- `philox_gumbel` and `philox_triton`: the same noise in torch and in Triton, a function of seed, choice and index
  alone.

The worker's `execution.cuda.device_ops` calls all of these; its sampling on the CPU and on the host uses
`philox_gumbel`. No import of another folder.
"""

"""Attention over the paged KV cache.

- `paged_decode`: one new token a sequence. `split_kv` divides keys among programs, `combine` adds the splits up.
  `paged_decode_fp8` is its kernel for an 8-bit cache on Hopper GPUs, `decode_fp8_tiles` what a warp of it does.
- `fused_decode`: for one row, head norm, rotary embedding, KV write and attention in one kernel.
- `paged_prefill`: several new tokens a sequence. `prefill_hopper` is the same for Hopper GPUs (`hopper_producer` loads,
  `hopper_consumer` computes). `prefill_splits` divides keys among programs for both.
- `packed/`: packed sequences of encoders, in both directions and without a cache.
- `latent/`: latent attention: its heads all read the same row of a token.
- `batch_invariant`: both, with results that depend on a row alone.
- `score_rules.ScoreRules`: what all take of a layer: scale, window, soft cap, sinks, scales of an 8-bit cache.
- `attention_tiles`: device functions over tiles that these share.
- `torch_sdpa`: plain torch, for CPUs.

Variables are FlashAttention's: m_i is a row's running maximum, l_i its sum of exponentials, acc its weighted values,
p a tile's probabilities before division by l_i, alpha the factor of earlier sums.

`services/gpu_worker/attention` calls these, and its table says which one a step takes. Types to know:
`kv_cache.paged_kv.PagedKVMetadata`, the rows of a step, and `split_kv.SplitKVSchedule`, the splits of a step. Imports
go to `kv_cache` and `layers`.
"""

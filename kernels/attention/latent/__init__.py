"""Latent attention (MLA, https://arxiv.org/abs/2405.04434) over the paged KV cache, which has one row a token.

A row is the normalised latent and one rotated part of K, both for all heads. Each head has matrices that make its K and
its V of the latent. Decodes move them to the query and behind the attention (absorption), prefills decompress rows.

- `write_latent`: norm and rotation of a step's rows, their write to the cache, and the rotation of queries.
- `head_products`: products with a matrix for each head, for absorption.
- `latent_decode`: one new token a sequence; all heads read the same rows. Split-KV as in `paged_decode`.
- `decode_hopper`: the same for Hopper GPUs and DeepSeek's sizes.
- `latent_prefill`: several new tokens a sequence, over K and V of one piece of its keys; pieces are joined by their
  log-sum-exps.
- `prefill_in_pieces`: the whole attention of prefills: gathers cached rows and decompresses them piece by piece.
- `latent_invariant`: decodes and prefills with absorption, a row's result depends on that row alone.

Imports go to `attention`, `kv_cache` and `layers`.
"""

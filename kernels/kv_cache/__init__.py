"""The paged KV cache on the device: its layout, and everything that is not attention.

A layer is [num_blocks, 2, kv_heads, block_size, head_dim], the 2 being K and V. `paged_kv.PagedKVMetadata` tells
kernels the slot, position and block table of each row; `kv_types` has the 8-bit dtypes and their scales.
`rope_write_kv` writes new K and V; `move_blocks` packs blocks for host memory;
`copy_blocks` copies blocks to other pools, with checksums in the same pass. `block_checksum` defines the checksum
of a block, which `block_checksum_triton` computes on a GPU. The worker's `attention/` and `kv_transfer` call these.
Imports go to `layers` alone.
"""

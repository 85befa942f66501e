"""Sums over the ranks of a host: kernels that write to each other's GPU memory.

- `peer_buffers.PeerBuffers`: the memory of one rank that all ranks write to, and how words of it say that they are
  there. `exchange`: the device functions that write to it and wait.
- `one_step`: every rank sends its part to every other one, and adds all parts.
- `two_step`: every rank adds the parts of its share of rows and sends the sums to the others. From three ranks on it
  moves fewer bytes.
- `references`: the same sums in torch. Without Triton.

All ranks get the same bits: parts are added in the order of ranks in float32, and the sum is rounded once. The kernels
also add the sum to the residual and compute its RMSNorm. Every rank calls the same kernels in the same order with equal
shapes. The worker's `parallel/` maps the memory and chooses by size between these kernels and NCCL.
"""

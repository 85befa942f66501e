"""Kernels of a decoder layer outside of attention.

- `linear_skinny`: matrix products of one to eight rows. `linear_stream_k`: of more rows. The worker's `linear_tuning`
  measures both against cuBLAS and picks one for each shape and number of rows.
- `add_rms_norm`: residual addition and RMSNorm. `rms_norm.RMSNorm`: RMSNorm in torch, and its weight.
- `add_layer_norm`: residual addition and LayerNorm.
- `norm_add_norm`: for layers with norms behind sublayers: such a norm, residual addition and the next norms.
- `norm_heads`: RMSNorm of the heads of q or k.
- `act_mul`: gated activations. `apply_rope`: rotary embedding in torch. `rotate_halves`: that of transformers' classes.
- `rounding`: how rows become codes of 8 bits, in torch; `round_row`: the same in kernels that write rows, by which
  `add_rms_norm_rounded` and `act_mul_rounded` make the inputs of products of 8 bits.

The worker's `layers/` and `linear_tuning/` call these. No import of another folder.
"""

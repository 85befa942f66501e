"""Replaces modules of a transformers class that our kernels can compute.

`transformers_model` calls `fusions.find_fusions` with a class on the meta device, and `placement.place_modules` with
the result. A module is replaced only if a copy of it gives what ours gives, on random input on the CPU; a module
that computes anything else stays as it is.

- `joint_products`: linear layers that multiply the same tensor, as one matrix product.
- `residual_sums`: sums of the residual and a sublayer's output, with the norm behind them.
- `norms`: RMSNorm. `gates`: MLPs with a gate.
- `rotations`: rotary embedding of q and k, and whether it may be in place.
- `experts`: mixtures of experts. `head`: the output layer without the layers before it, or ours.
- `connection`: our attention and experts as transformers looks them up. `trial`: the test of a class.
- `tensor_parallel`: what ranks have of a class, by its own plan.
- `stored_names`: names and parts of weights in checkpoints.
- `module_calls`: the calls of a forward pass on the meta device. `probes`: comparison with a copy of a module.
- `attention_input`: q, k and v as our attention reads them.
- `fusions.Fusions`: the modules of a model that our kernels can compute, by name.
- `placement`: gives modules their places and their weights places in the `WeightTable`.
"""

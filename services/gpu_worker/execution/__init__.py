"""How steps are computed on a device: eagerly, by CUDA graphs, and ahead of the host."""

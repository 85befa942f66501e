"""The kernel table: a module a family of kernels, with `measure`."""

"""Kernels of decoder layers beside attention: linear layers, RMSNorm, the MLP's activation, rotary embedding."""

"""Triton kernels of a CUDA device: the small steps between GEMMs and attention, each one kernel. They need `triton`."""
